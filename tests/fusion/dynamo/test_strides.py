"""Inputs of symbolic sizes that are changed in place: views of them, and they themselves, are as in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

import fusion
from fusion.dynamo.kept_strides import keep_strides, written_with_its_strides

ROWS = torch.tensor([1, 0, 3])


def masked(x: Tensor) -> tuple[Tensor, ...]:
    x.masked_fill_(mask=x > 3, value=0.0)
    return (x.view(x.shape),)


def added_at_rows(x: Tensor) -> tuple[Tensor, ...]:
    x.index_add_(0, ROWS, x[:3] * 0.5)
    return x.reshape(x.shape[0], -1), x.t(), x * 2


def several(x: Tensor) -> tuple[Tensor, ...]:
    torch.Tensor.scatter_(x, 1, torch.zeros(4, 5, dtype=torch.int64), 2.0)
    x.cumsum_(0)
    x.t()[1:].tril_()
    return x[1:].view(x.shape[0] - 1, x.shape[1]), x


def of_another_layout(x: Tensor) -> tuple[Tensor, ...]:
    """Views, random numbers and results that keep their layout have no result of their own, and stay."""
    x.t_()
    x.mul_(2).bernoulli_(1.0)
    return x.view(x.shape), x.t()


@pytest.mark.parametrize("program", [masked, added_at_rows, several, of_another_layout])
@pytest.mark.parametrize("wanted", [False, True], ids=["given", "trained"])
def test_views_of_an_input_changed_in_place_are_of_its_numbers(
    program: Callable[[Tensor], tuple[Tensor, ...]], wanted: bool
) -> None:
    fused = fusion.fuse(program, dynamic=True, options={"strict": True})
    for rows in (7, 9):
        mine, yours = (torch.arange(5.0 * rows).view(5, rows).requires_grad_(wanted).mul(0.5).t() for _ in range(2))
        actual, expected = fused(mine), program(yours)
        assert torch.equal(mine, yours) and mine.stride() == yours.stride()
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride()
            assert (one.data_ptr() == mine.data_ptr()) == (other.data_ptr() == yours.data_ptr())
    graphs = fusion.report(fused).graphs
    assert any(graph.kernels for graph in graphs) and not any(graph.failure for graph in graphs)


@pytest.mark.parametrize("returned", [True, False], ids=["returned", "read"])
def test_only_where_a_view_is_returned_the_write_is_another(returned: bool) -> None:
    """A cache that is written at some rows is not copied."""
    targets: list[object] = []

    def backend(graph: fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        keep_strides(graph)
        targets.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.index_copy_(0, ROWS, y)
        return x.view(x.shape) if returned else x.sum(1) * 2

    torch.compile(f, backend=backend, dynamic=True)(torch.arange(35.0).view(5, 7).t(), torch.ones(3, 5))
    assert (written_with_its_strides in targets) is returned


def test_the_change_is_made_to_the_tensor_itself() -> None:
    x = torch.arange(6.0).view(2, 3).t()
    assert written_with_its_strides("tril", x, -1) is x
    assert torch.equal(x, torch.arange(6.0).view(2, 3).t().tril(-1)) and x.stride() == (1, 3)
