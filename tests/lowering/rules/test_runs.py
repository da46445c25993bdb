"""Sums scattered to ascending positions against eager: where runs are known, nothing is scattered or compared."""

from __future__ import annotations

import pytest
import torch

import fusion
from fusion.lowering.ir.program import Program, Reduce, Scatter
from tests.lowering.lowered import check

aten = torch.ops.aten


def scatters(program: Program) -> int:
    return sum(isinstance(node, Scatter) for node in program.nodes)


def summed(program: Program) -> list[int]:
    """How many terms the sums of a program have, each dimension by itself."""
    return [int(axis.size) for node in program.nodes if isinstance(node, Reduce) for axis in node.over]


def nearest(x: torch.Tensor, size: int, shift: float, count: int) -> torch.Tensor:
    """The index of nearest-neighbour resampling, as PyTorch decomposes it."""
    return ((torch.arange(count, dtype=torch.float32) + shift) * (size / count)).to(torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [0.0, 0.5])
@pytest.mark.parametrize(
    ("sizes", "counts"), [((4, 6), (8, 18)), ((5, 7), (13, 9)), ((9, 8), (4, 8)), ((3, 1), (7, 5))]
)
def test_gradients_of_resampling_are_sums_of_runs(sizes, counts, shift, dtype):
    grad = torch.randn(2, *counts, 3).movedim(-1, 1).to(dtype)

    def gradient(g: torch.Tensor) -> torch.Tensor:
        down, across = (nearest(g, size, shift, count) for size, count in zip(sizes, counts, strict=True))
        return aten._unsafe_index_put(g.new_zeros(2, 3, *sizes), [None, None, down[:, None], across], g, True)

    assert scatters(check(gradient, grad)) == 0


def test_initial_values_are_added_and_other_dimensions_are_indexed():
    x, source = torch.randn(5, 4), torch.randn(9, 4)
    assert summed(check(lambda x, s: aten.index_put(x, [torch.arange(9) // 2], s, True), x, source)) == [2]
    ends = lambda: (torch.arange(8) * 2 - 1).clamp(0) // 4  # noqa: E731  # the first one and the last are others
    assert summed(check(lambda x, s: aten.index_put(x, [None, ends()], s.t(), True), x[:4], source[:8])) == [3]


def test_indices_that_do_not_ascend_or_are_loaded_are_scattered():
    x, source = torch.randn(40, 2000), torch.randn(64, 2000)
    down = lambda: (63 - torch.arange(64)) // 2  # noqa: E731
    assert scatters(check(lambda x, s: aten.index_put(x, [down()], s, True), x, source)) == 1
    loaded = torch.arange(64) // 2
    assert scatters(check(lambda x, s, i: aten.index_put(x, [i], s, True), x, source, loaded)) == 1
    one = lambda: torch.arange(64) // 64  # noqa: E731  # more sources of one element than it may sum
    assert scatters(check(lambda x, s: aten.index_put(x, [one()], s, True), x, source)) == 1


def test_places_that_move_by_a_symbolic_number_are_scattered():
    def spread(x: torch.Tensor, by: int) -> torch.Tensor:
        return x.new_zeros(20).index_put((torch.arange(8, device=x.device) + by,), x, accumulate=True)

    x = torch.randn(8)
    compiled = fusion.fuse(spread, dynamic=True)
    for by in (7, -4):
        torch.testing.assert_close(compiled(x, by), spread(x, by), rtol=0, atol=0)
    assert all(not graph.failure for graph in fusion.report(compiled).graphs)
