"""Views of forward's inputs: the input is saved, and backward computes the view."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion

Program = Callable[..., Tensor]


def grads(program: Program, given: list[Tensor]) -> tuple[Tensor, ...]:
    result = program(*given)
    return torch.autograd.grad(result, given, torch.ones_like(result))


def saved(program: Program, given: list[Tensor]) -> list[Tensor]:
    """Return the tensors that a call saves for backward."""
    results: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        results.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        program(*given)
    return results


def turned(x: Tensor, w: Tensor) -> Tensor:
    return (x.transpose(0, 1).reshape(4, 2, 6).unsqueeze(0) * w.t()[:, None].expand(4, 2, 6)).exp()


def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(x.view(-1, 6) @ w.view(3, 4, 6).permute(2, 0, 1).reshape(6, 12))


def parts_of_one_input(x: Tensor, w: Tensor) -> Tensor:
    a, b = x.view(8, 6).unbind(0)[:2]
    return torch.sin(a) * torch.cos(b) + w.sum()


CASES: list[tuple[Program, tuple[tuple[int, ...], tuple[int, ...]]]] = [
    (turned, ((2, 4, 6), (6, 4))),
    (product, ((2, 4, 6), (12, 6))),
    (parts_of_one_input, ((2, 4, 6), (3,))),
]


@pytest.mark.parametrize(("program", "shapes"), CASES)
def test_gradients_agree_with_eager(program: Program, shapes: tuple[tuple[int, ...], ...]) -> None:
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    fused = fusion.fuse(program, options={"strict": True})
    for got, expected in zip(grads(fused, given), grads(program, given), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("program", "shapes"), CASES[:2])
def test_the_input_itself_is_saved(program: Program, shapes: tuple[tuple[int, ...], ...]) -> None:
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    fused = fusion.fuse(program, options={"strict": True})
    kept = saved(fused, given)
    views = [tensor for tensor in kept if tensor._base is not None]
    assert {tensor.data_ptr() for tensor in given} <= {tensor.data_ptr() for tensor in kept}
    assert not views and len(kept) == len({tensor.data_ptr() for tensor in kept})


def test_a_part_of_an_input_is_saved_as_that() -> None:
    x = torch.randn(8, 6, requires_grad=True)
    (kept,) = saved(fusion.fuse(lambda x: torch.sin(x[2])), [x])
    assert kept.shape == (6,)


def test_a_change_of_an_input_before_backward_is_noticed() -> None:
    x, w = torch.randn(2, 4, 6, requires_grad=True), torch.randn(12, 6, requires_grad=True)
    result = fusion.fuse(product, options={"strict": True})(x, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
