"""Regressions with a backward: minimised failures of random programs."""

from __future__ import annotations

import torch

from tests.random_programs.inputs import Input
from tests.random_programs.program import Program

GRADIENTS = {
    "the gradient of a gather, of sizes that are not known": Program(
        inputs=(
            Input("x0", ("A", "C", "B"), torch.float32, grad=True),
            Input("x1", ("C", "B"), torch.int64, layout="expanded"),
        ),
        source="""
            t0 = x0[x1 % x0.shape[0], x1 % x0.shape[1]]
            return (t0,)
        """,
        calls=({"A": 3, "B": 5, "C": 33}, {"A": 4, "B": 4, "C": 32}),
        dynamic=True,
        backward=True,
    ),
    "an input overwritten after a fold that is compared with it": Program(
        inputs=(Input("x0", ("B", 1), torch.float16), Input("x1", ("B", 1), torch.float32, grad=True)),
        source="""
            t0 = x0 + x1
            t1 = t0.min()
            x0.relu_()
            return (t1,)
        """,
        calls=({"B": 20},),
        backward=True,
    ),
    "the gradient of a diagonal without elements": Program(
        inputs=(Input("x0", ("A", 0), torch.float16, grad=True),),
        source="""
            t0 = x0.diagonal()
            t1 = t0 * torch.softmax(t0, 0).sum(0, keepdim=True)
            return (t1,)
        """,
        calls=({"A": 3},),
        backward=True,
    ),
    "a product without elements, and one over no elements": Program(
        inputs=(
            Input("x0", ("B", "A"), torch.float32, grad=True),
            Input("x1", ("A", "A"), torch.float32, grad=True),
        ),
        source="""
            t0 = x0 @ x1.mT * 0.5
            t1 = x0.mT @ x0 + x1
            return (t0, t1,)
        """,
        calls=({"A": 5, "B": 0},),
        backward=True,
    ),
    "the sum over no elements of a value that is loaded once": Program(
        inputs=(Input("x0", (0, "A", 1), torch.float32, grad=True), Input("x1", (1,), torch.float32, grad=True)),
        source="""
            t0 = x1 / (x0.abs() + 0.5)
            return (t0, t0.sum(0),)
        """,
        calls=({"A": 5},),
        backward=True,
    ),
    "a sum of two halves of an epilogue": Program(
        inputs=(Input("x0", ("B", "B"), torch.float32, grad=True),),
        source="""
            t0 = F.glu(torch.cat([x0, x0 + 1], 0), 0)
            t1 = torch.relu(t0)
            return (F.linear(t1, t1),)
        """,
        calls=({"B": 2},),
        backward=True,
    ),
    "a stored 16-bit row, read unrounded by one kernel and rounded by another": Program(
        inputs=(
            Input("x0", ("A", "A"), torch.bfloat16, layout="expanded", values="positive", grad=True),
            Input("x1", (1, "A"), torch.bfloat16, values="positive", grad=True),
        ),
        source="""
            t0 = x0 @ x1.mT * 0.5
            t1 = torch.eye(t0.shape[-1], device=t0.device) * t0
            t2 = F.layer_norm(t1.relu(), t1.shape[-1:])
            return (t2, t0,)
        """,
        calls=({"A": 6},),
        backward=True,
    ),
    "the gradient of windows of an image of sizes that are not known": Program(
        inputs=(Input("x0", ("A", "B", "C"), torch.float32, grad=True),),
        source="""
            t0 = F.unfold(x0[None], 2) * 2
            return (t0,)
        """,
        calls=({"A": 2, "B": 3, "C": 5}, {"A": 4, "B": 5, "C": 6}),
        dynamic=True,
        backward=True,
    ),
    "the gradient of a minimum of a normalised half, which backward would round otherwise": Program(
        inputs=(Input("x0", (1, "B", "B"), torch.float16, grad=True),),
        source="""
            t0 = torch.hstack([x0, x0])
            t1 = torch.xlogy(t0.abs(), t0.abs() + 0.5)
            t2 = (t1 - t1.mean((0, 2), keepdim=True)) / (t1.var((0, 2), correction=0, keepdim=True) + 0.1).sqrt()
            t3 = t2.amin(2)
            return (t3, t0,)
        """,
        calls=({"B": 5},),
        backward=True,
        seed=297,
    ),
    "a norm along a single element": Program(
        inputs=(Input("x0", ("A", 1), torch.float32, grad=True), Input("x1", (1,), torch.float32)),
        source="""
            t0 = x0.norm(dim=-1) * 2
            return (t0, x1.norm(dim=-1) + 1, torch.linalg.vector_norm(x0, 3, 1, True) + 1,)
        """,
        calls=({"A": 7},),
        backward=True,
    ),
    "a size read off a norm along a single element": Program(
        inputs=(Input("x0", ("A", "B", 1), torch.bfloat16, values="positive", grad=True),),
        source="""
            t0 = torch.linalg.norm(x0, dim=-1)
            return (F.one_hot(t0.argmax(-1), t0.shape[-1]), t0,)
        """,
        calls=({"A": 7, "B": 20},),
        backward=True,
    ),
    "the gradient of a smooth distance of NaN": Program(
        inputs=(
            Input("x0", ("A",), torch.float32, values="special", grad=True),
            Input("x1", ("A",), torch.float32, values="grid", grad=True),
        ),
        source="""
            t0 = F.smooth_l1_loss(x0, x1, beta=0.5)
            t1 = F.smooth_l1_loss(x0, x1, reduction='none')
            return (t0, t1, F.huber_loss(x0, x1, reduction='none', delta=0.5),)
        """,
        calls=({"A": 77},),
        backward=True,
    ),
    "attention of no keys": Program(
        inputs=(
            Input("x0", ("B", "A", "C"), torch.float32),
            Input("x1", ("C", 0, "C"), torch.float64),
            Input("x3", ("C", 0, "C"), torch.float64, grad=True),
        ),
        source="""
            t0 = torch.view_as_real(torch.complex(x0.float(), x1.float()) * 1.5).select(-1, 1)
            return (F.scaled_dot_product_attention(t0.clamp(-3, 3), t0, x3.to(t0.dtype), scale=0.3),)
        """,
        calls=({"A": 0, "B": 1, "C": 8},),
        backward=True,
    ),
    "the gradient of a product of vectors of which one number is read": Program(
        inputs=(
            Input("x1", ("C", "B", 1), torch.float64, grad=True),
            Input("x3", (1, "A"), torch.float64, layout="padded", values="positive", grad=True),
            Input("x4", (), torch.bfloat16, grad=True),
        ),
        source="""
            t0 = (x1 @ x3).reshape(-1)
            t1 = t0[n % t0.shape[0]] * torch.clamp(1 / (x4.norm() + 0.5), max=1.0)
            t2 = (x1.logit(0.1) * 2).contiguous()
            t3 = torch.cat([t2, t2[:1].expand(3, *t2.shape[1:])], 0)
            return (t1, t3, *torch.var_mean(t2, 2, correction=0),)
        """,
        calls=({"A": 16, "B": 40, "C": 4, "n": -5}, {"A": 15, "B": 42, "C": 5, "n": -8}),
        dynamic=True,
        backward=True,
        seed=513,
        integers=("n",),
    ),
}
