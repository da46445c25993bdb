"""Reductions of segments and their gradients against eager: no call remains."""

from __future__ import annotations

import math

import pytest
import torch

from fusion.lowering.interpret import run_program
from fusion.lowering.ir.program import Scatter
from fusion.lowering.lower import lower
from tests.lowering.lowered import calls, check, traced

aten = torch.ops.aten

LENGTHS = {
    0: torch.tensor([2, 0, 3, 1, 0]),
    1: torch.tensor([[0, 1, 3], [2, 2, 0], [4, 0, 0], [1, 1, 1]]),
}
"""By the dimension of the segments; the last elements are in none."""


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(lengths[..., :1]), lengths.cumsum(-1)], -1)


def numbers(dim: int) -> torch.Tensor:
    x = ((torch.arange(112) * 37 % 19 - 9).double() / 8).view(7, 4, 4).transpose(1, 2)
    return x if dim == 0 else x.transpose(0, 1)


@pytest.mark.parametrize("initial", [None, 1.5])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("dim", [0, 1])
def test_segments_and_their_gradients(dim, reduce, initial):
    x, lengths = numbers(dim), LENGTHS[dim]
    if reduce == "prod":
        x = x.clone()
        x[0, 0, 0], x[1, 1, 1] = math.nan, math.nan
    kwargs = {"axis": dim, "unsafe": True, "initial": initial}
    for reported in ({"lengths": lengths}, {"offsets": offsets_of(lengths) + (dim == 0)}):
        ((name, tensor),) = reported.items()
        check(lambda x, t: torch.segment_reduce(x, reduce, **{name: t}, **kwargs), x, tensor)  # noqa: B023
        out = torch.segment_reduce(x, reduce, **reported, **kwargs)
        grad = (torch.arange(out.numel()).double() % 7 - 3).view(out.shape)
        check(
            lambda g, o, x, t: aten._segment_reduce_backward(
                g,
                o,
                x,
                reduce,
                **{name: t},  # noqa: B023
                axis=dim,
                initial=initial,
            ),
            grad,
            out,
            x.contiguous(),
            tensor,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype):
    x = numbers(0).to(dtype)
    check(lambda x, n: torch.segment_reduce(x, "max", lengths=n, unsafe=True), x, LENGTHS[0].int())
    check(lambda x, n: torch.segment_reduce(x, "mean", lengths=n, unsafe=True), x, LENGTHS[0])


@pytest.mark.parametrize("dim", [0, 1])
def test_products_without_atomic_updates_in_memory(dim):
    """As on a GPU: each segment reads all elements, of which there are few."""
    x, lengths = numbers(dim), LENGTHS[dim]

    def product(x, n):
        out = torch.segment_reduce(x, "prod", lengths=n, axis=dim, unsafe=True, initial=1.5)
        return out, aten._segment_reduce_backward(out + 1, out, x, "prod", lengths=n, axis=dim, initial=1.5)

    program = lower(traced(product, (x, lengths)), scatters={"sum"})
    assert not calls(program) and not any(isinstance(node, Scatter) and node.op == "prod" for node in program.nodes)
    for actual, wanted in zip(run_program(program, [x, lengths]), product(x, lengths), strict=True):
        torch.testing.assert_close(actual, wanted)
    long = torch.rand(5000).double()
    graph = traced(lambda x, n: torch.segment_reduce(x, "prod", lengths=n), (long, torch.tensor([2000, 3000])))
    assert list(calls(lower(graph, scatters={"sum"}))) == ["segment_reduce.default"]
