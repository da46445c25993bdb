"""Regressions without a backward: minimised failures of random programs."""

from __future__ import annotations

import torch

from tests.random_programs.inputs import Input
from tests.random_programs.program import Program

RESULTS = {
    "a rolled axis read backwards": Program(
        inputs=(Input("x0", ("A", 1, "B", "C"), torch.float32),),
        source="""
            t0 = x0.roll((1, -2), (-1, -2))
            t1 = t0.index_select(2, torch.arange(t0.shape[2] - 1, -1, -1, device=t0.device))
            return (t1,)
        """,
        calls=({"A": 1, "B": 8, "C": 1},),
    ),
    "the same with sizes that are not known": Program(
        inputs=(Input("x0", ("A", "B"), torch.float32),),
        source="""
            t0 = x0.roll(3, 0).flip(0)
            t1 = x0.flip(1).roll(-2, 1).flatten()[::2]
            return (t0, t1,)
        """,
        calls=({"A": 8, "B": 5}, {"A": 7, "B": 9}),
        dynamic=True,
    ),
    "a kernel that reads an input stays before the one that overwrites it": Program(
        inputs=(Input("x0", (2,), torch.float32), Input("x1", (2,), torch.float16)),
        source="""
            t0 = x1 / x1.numel()
            t1 = t0 != 0
            t2 = x1 + x0
            t3 = t1.sum(0, keepdim=True)
            x0[0].copy_(x0[-1])
            return (t2, t3,)
        """,
        calls=({},),
    ),
    "a copy that is only a view of an input keeps the old values": Program(
        inputs=(Input("x0", ("A", "B"), torch.float32),),
        source="""
            t0 = x0.t()[:2].reshape(-1)
            t1 = x0.expand(3, *x0.shape).clone()
            x0.add_(1)
            return (t0, t1, x0.sum(),)
        """,
        calls=({"A": 4, "B": 5},),
    ),
    "a copy of an input keeps the old values if the overwritten input is returned": Program(
        inputs=(Input("x0", ("A", 4), torch.float32, layout="transposed"), Input("x1", (4,), torch.float32)),
        source="""
            t0 = x0.to(torch.float32)
            t1 = x0.unsqueeze(1).repeat_interleave(1, 1)
            t2 = x0.flip(0)
            x0.lerp_(x1.expand_as(x0), 0.5)
            x1.add_(x0.sum(0))
            return (t0, t1, t2, x1, x0,)
        """,
        calls=({"A": 3},),
    ),
    "an input that is overwritten by its own values, and returned": Program(
        inputs=(Input("x0", ("A", "B"), torch.float32),),
        source="""
            t0 = x0.to(torch.float32)
            x0.copy_(x0.clone())
            return (t0, x0.sum(),)
        """,
        calls=({"A": 4, "B": 5},),
    ),
    "two inputs change places": Program(
        inputs=(Input("x0", ("A", "B"), torch.float32), Input("x1", ("A", "B"), torch.float32)),
        source="""
            t0 = x0.clone()
            x0.copy_(x1)
            x1.copy_(t0)
            return (t0[0],)
        """,
        calls=({"A": 4, "B": 5},),
    ),
    "views of inputs that each other's updates read": Program(
        inputs=(Input("x0", ("A", "B"), torch.float32), Input("x1", ("A", "B"), torch.float32)),
        source="""
            t0 = x0.roll(1, 0)
            t1 = (x0 + 1).t()
            x0.add_(x1)
            x1[1:].copy_(x0[:-1])
            return (t0, t1[:2] * 2, t1.reshape(-1), x0.t().contiguous(), x1[0],)
        """,
        calls=({"A": 4, "B": 5},),
    ),
    "a position in a dimension of one element": Program(
        inputs=(Input("x0", (1,), torch.float16), Input("x1", (1,), torch.float32)),
        source="""
            t0 = torch.minimum(x1, x0)
            t1 = torch.take_along_dim(t0, x0.argmin(-1, keepdim=True) % t0.shape[-1], -1)
            return (t1,)
        """,
        calls=({},),
    ),
    "a fold of one element fused with a longer one": Program(
        inputs=(Input("x0", ("A", "B"), torch.float32), Input("x1", ("A", "B"), torch.float32)),
        source="""
            t0, t1 = torch.var_mean(x0, 0, correction=0)
            t2 = t1.index_fill(0, torch.tensor([0], device=t1.device), 1.5)
            t3 = torch.expm1(t2)
            t4 = torch.atan2(x1, t3.abs() + 0.5)
            return (t4,)
        """,
        calls=({"A": 1024, "B": 3},),
    ),
    "a product whose loop is the even points of another one's": Program(
        inputs=(Input("x0", (5, 1), torch.float32, values="positive"), Input("x1", (5,), torch.float32)),
        source="""
            t0 = x1 @ x0
            t1 = x1 * 1
            t1[::2].mul_(3)
            t2 = t1 / 2.0
            t3 = t2 / (t2.abs().sum(0, keepdim=True) + 0.5)
            return (t0, t3,)
        """,
        calls=({},),
    ),
    "folds read past their ends by padding": Program(
        inputs=(Input("x0", ("A", "A", "A"), torch.float32),),
        source="""
            t0 = torch.softmax(x0, 2)
            t1 = F.pad(t0, (0, 0, 1, 0), value=-2)
            t2 = F.pad(x0.cumsum(2), (1, 0, 0, 1)).sum(-1)
            return (t1.max(-1)[1], t1 - t1.mean(-1, keepdim=True), t2,)
        """,
        calls=({"A": 6},),
    ),
    "a bool among the positions that are taken": Program(
        inputs=(Input("x0", ("C", "A"), torch.bool), Input("x1", ("C", "A"), torch.int64)),
        source="""
            t0 = torch.vstack([x1, x0])
            t1 = x0.take(t0 % x0.numel())
            return (t1,)
        """,
        calls=({"A": 40, "C": 1},),
    ),
    "a product with an extreme that keeps dimensions of one element": Program(
        inputs=(Input("x0", ("A", "C"), torch.float32), Input("x1", (1, "C"), torch.float32)),
        source="""
            t0 = (x0 + 1).amax((0, -1), keepdim=True)
            return (t0 @ x1, x1 @ x0.sum(0, keepdim=True).mT,)
        """,
        calls=({"A": 7, "C": 3},),
    ),
    "the position of an extreme with a softmax of the same row": Program(
        inputs=(Input("x0", ("B",), torch.float32),),
        source="""
            t0 = x0.argmax()
            t1 = torch.softmax(x0, -1)
            return (t0, t1,)
        """,
        calls=({"B": 9}, {"B": 6}),
        dynamic=True,
    ),
    "views of an extreme that keeps dimensions of one element": Program(
        inputs=(Input("x0", (3, 3), torch.float32),),
        source="""
            t0 = (x0 + 1).max(-2, keepdim=True)[0]
            t1 = x0.amin(0, keepdim=True)
            return (t0.diagonal(0, -1, -2), t0.reshape(-1), t1.squeeze(), t1,)
        """,
        calls=({},),
    ),
    "halves too small to be normal numbers, compared with 0": Program(
        inputs=(Input("x0", ("B", "B"), torch.bfloat16), Input("x1", (1, "B"), torch.bfloat16, values="grid")),
        source="""
            t0 = torch.softmax(x0 * 32, -1)
            return (t0 <= x1,)
        """,
        calls=({"B": 32},),
        seed=5,
    ),
    "a slice of unknown size": Program(
        inputs=(Input("x0", ("A", 1), torch.float32), Input("x1", (1, 1), torch.float16)),
        source="""
            t0 = x0 / (x1.abs() + 0.5)
            t1, t2 = torch.unbind(t0[:2])
            return (t1.mean(0, keepdim=True), t2.square(),)
        """,
        calls=({"A": 32}, {"A": 37}),
        dynamic=True,
    ),
    "two equal sums of a softmax, of rows of a length that is not known": Program(
        inputs=(Input("x0", (1, "B"), torch.float32),),
        source="""
            t0 = x0.sinc()
            t1 = t0 * torch.softmax(t0, -1).sum(-1, keepdim=True)
            t2 = t0 * torch.softmax(t0, -1).sum(-1, keepdim=True) + 1
            return (t1, t2,)
        """,
        calls=({"B": 7}, {"B": 9}),
        dynamic=True,
    ),
    "one row that is repeated, with another put into it": Program(
        inputs=(Input("x0", ("A", "C"), torch.float16, layout="expanded"),),
        source="""
            t0 = x0.slice_scatter(x0.narrow(-2, 0, 1) + 1, -2, 0, 1)
            return (t0,)
        """,
        calls=({"A": 8, "C": 3},),
    ),
    "a transposed half in a minimum that is overwritten with zeros": Program(
        inputs=(
            Input("x0", ("B", "A"), torch.bfloat16, layout="transposed"),
            Input("x1", ("B", "A"), torch.float32),
        ),
        source="""
            t0 = torch.minimum(torch.sqrt(x0.abs() + 0.1), x1)
            t0.zero_()
            return (t0,)
        """,
        calls=({"A": 65, "B": 4},),
    ),
    "nothing of two dtypes, one after the other": Program(
        inputs=(
            Input("x0", ("A", 0), torch.float32),
            Input("x1", (3, 0), torch.float16),
            Input("x2", (3,), torch.int64),
        ),
        source="""
            t0 = torch.cat([x1.flatten(), x0.flatten()])
            return (t0, x2 * 2,)
        """,
        calls=({"A": 4},),
    ),
    "the order of halves that are computed": Program(
        inputs=(Input("x0", ("C", "A"), torch.float16),),
        source="""
            t0 = torch.xlogy(x0.abs(), x0.abs() + 0.5)
            t1 = t0.sort(dim=-2, stable=True)[1]
            return (t1, t0.exp().median(0)[0],)
        """,
        calls=({"A": 1, "C": 16},),
        seed=1050,
    ),
    "parts of a row that are stored along another axis": Program(
        inputs=(Input("x0", ("B", "A"), torch.float16), Input("x1", ("B", "A"), torch.float32)),
        source="""
            t0 = torch.hstack([x0, x1])
            t1 = (t0 - t0.min()) / (t0.max() - t0.min() + 0.5)
            return (t1.transpose(0, -1).reshape(t1.shape),)
        """,
        calls=({"A": 40, "B": 4},),
    ),
    "nothing with its channels last": Program(
        inputs=(Input("x0", (0, 1, "A", 0), torch.bfloat16), Input("x1", ("A",), torch.float32)),
        source="""
            t0 = (x0 * 0.3).to(memory_format=torch.channels_last)
            return (t0, x1 * 2,)
        """,
        calls=({"A": 3},),
    ),
    "the diagonal of a copy, of a size that is not known": Program(
        inputs=(Input("x0", ("C", 1), torch.bfloat16),),
        source="""
            t0 = x0.repeat_interleave(1, 1)
            return (t0.diagonal(), t0 * 2,)
        """,
        calls=({"C": 33}, {"C": 35}),
        dynamic=True,
    ),
    "a product with a matrix that is computed from a size": Program(
        inputs=(Input("x0", ("B", 1, 1, "C"), torch.float32), Input("x1", ("C",), torch.float32)),
        source="""
            t0 = F.linear(x0, torch.eye(x0.shape[-1], device=x0.device), x1).relu()
            return (t0,)
        """,
        calls=({"B": 31, "C": 18}, {"B": 5, "C": 9}),
        dynamic=True,
    ),
    "a negative zero that the program names": Program(
        inputs=(Input("x0", ("A",), torch.float32), Input("x1", ("A",), torch.bfloat16)),
        source="""
            t0 = torch.where(x1 > 0, x1, -0.0).reciprocal()
            t1 = (x0 * 0 + -0.0).reciprocal()
            t2 = F.pad(x0, (1, 2), value=-0.0).reciprocal()
            return ((x0 * -0.0).reciprocal(), t0, t1, t2, x1.clamp(max=-0.0).reciprocal(),)
        """,
        calls=({"A": 9},),
    ),
    "a float that becomes an integer and a float again": Program(
        inputs=(Input("x0", ("A",), torch.float32, values="special"), Input("x1", ("A",), torch.float64)),
        source="""
            t0 = x0.to(torch.int32).to(torch.float32)
            t1 = x1.to(torch.int64).to(torch.float64).reciprocal()
            return (t0.reciprocal(), t0.clamp(-9, 9), (x0.to(torch.int64) * 0.5).reciprocal(), t1,)
        """,
        calls=({"A": 67},),
    ),
    "attention between queries and keys that are one row, repeated, over values that are another": Program(
        inputs=(
            Input("x0", ("A", "B"), torch.float32, layout="expanded", values="positive"),
            Input("x1", ("A", "B"), torch.float32, values="positive"),
        ),
        source="""
            t0 = torch.softmax((x0 @ x0.mT) * 0.5, -1) @ x1
            t1 = torch.softmax((x1 @ x1.mT) * 0.5, -1) @ x0
            return (t0, t1,)
        """,
        calls=({"A": 512, "B": 3},),
    ),
    "the sum of one number, which is no negative zero": Program(
        inputs=(Input("x0", ("A", 1), torch.float32, values="positive"),),
        source="return ((-x0.abs() * 0).sum(1).reciprocal(), (x0 * 0 * -1).mean(1).reciprocal(),)",
        calls=({"A": 3},),
    ),
    "channels that are shuffled one by one, which stay where they are": Program(
        inputs=(Input("x0", ("B", "A", 1), torch.float32), Input("x1", ("B", 4, "A", "C"), torch.float32)),
        source="""
            t0 = F.channel_shuffle(x0, x0.shape[1])
            t1 = F.channel_shuffle(x1, 1)
            return (t0, t1, F.channel_shuffle(x1, 4), F.channel_shuffle(x1, 2),)
        """,
        calls=({"A": 4, "B": 9, "C": 3},),
    ),
    "the mean of nothing as an integer": Program(
        inputs=(Input("x0", ("A",), torch.float32), Input("x1", (0,), torch.float32)),
        source="""
            t0 = x1.mean()
            return (t0.clamp(-9, 9).to(torch.int64), t0.to(torch.int32), t0.to(torch.uint8), x0 * 2,)
        """,
        calls=({"A": 1},),
    ),
    "edges of a symbolic width that turns out 0": Program(
        inputs=(Input("x0", ("B", "A"), torch.float32, layout="reversed"),),
        source="return (F.pad(x0, (n % 3, m % 2)),)",
        calls=({"A": 130, "B": 3, "n": 9, "m": -6}, {"A": 13, "B": 4, "n": 10, "m": 3}),
        dynamic=True,
        integers=("n", "m"),
    ),
    "an operand whose order of dimensions is unknown for symbolic sizes": Program(
        inputs=(Input("x0", ("B", 1, 1, "B"), torch.int64, layout="expanded"), Input("x2", (1,), torch.int32)),
        source="""
            t0 = torch.logical_not(x0.to(torch.int16).sum(-2)) * 1
            t1 = t0[..., -1].transpose(1, -2)
            t1.narrow(1, 0, 1).mul_(3)
            t2 = t1 // (x2.abs() % 9 + 1)
            t3 = t0[..., -1] * 1
            t3[1:].flatten().add_(2)
            return (t2, t3,)
        """,
        calls=({"B": 16}, {"B": 13}),
        dynamic=True,
    ),
    "maxima of rows beside masked copies of them, both in one loop of narrow lanes": Program(
        inputs=(Input("y1", ("C", "A", "A"), torch.bfloat16),),
        source="""
            t0 = torch.cat([y1, y1.triu(-1)], -1)
            return (t0.max(-1)[0], t0.amin(-1), t0.half().amax(-1),)
        """,
        calls=({"A": 32, "C": 2}, {"A": 16, "C": 3}, {"A": 64, "C": 1}),
    ),
}
