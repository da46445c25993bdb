"""Writes to windows of `unfold` leave the elements between and after the windows unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion

Program = Callable[[Tensor], tuple[Tensor, ...]]


def with_a_rest(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 1
    windows = y.unfold(-1, 2, 2)
    windows.add_(2)
    return y, windows * y.sum()


def with_gaps(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    y.unfold(dimension=0, size=2, step=3).mul_(y[0, 0].exp())
    return (y,)


def only_one(x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    y.unfold(1, 6, 2).neg_()
    return (y,)


def patches(x: Tensor) -> tuple[Tensor, ...]:
    """Of two dimensions, and of these some are written."""
    y = x.cos()
    tiles = y.unfold(0, 2, 4).unfold(1, 3, 3)
    tiles[1:].permute(0, 2, 1, 3).mul_(2)
    tiles.unbind(1)[0].sub_(1)
    return y, tiles


def into_out(x: Tensor) -> tuple[Tensor, ...]:
    y = x.clone()
    torch.exp(x[:2], out=y.unfold(0, 2, 4)[0].t())
    return (y,)


def given(x: Tensor) -> tuple[Tensor, ...]:
    x.unfold(1, 2, 3)[:] = 7
    return (x.sum(),)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [with_a_rest, with_gaps, only_one, patches, into_out, given])
def test_elements_between_written_windows_are_kept(program: Program, dynamic: bool) -> None:
    fused = fusion.fuse(program, dynamic=dynamic, options={"strict": True})
    for shape in ((9, 7), (12, 7)):
        x = torch.randn(shape)
        own = x.clone()
        torch.testing.assert_close((*fused(own), own), (*program(x), x))
    assert fusion.report(fused).kernels


def test_gradients_of_elements_between_written_windows() -> None:
    fused = fusion.fuse(with_a_rest, options={"strict": True})
    x = torch.randn(3, 5, requires_grad=True)
    actual, expected = (torch.autograd.grad(program(x)[1].sum(), x) for program in (fused, with_a_rest))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_gaps_larger_than_the_rest_after_the_last_window(dynamic: bool) -> None:
    """They are left to eager; if one graph serves all sizes, a size with a larger rest is compiled anew."""

    def program(x: Tensor) -> Tensor:
        y = x * 2
        y.unfold(0, 2, 4).add_(1)
        return y

    fused = fusion.fuse(program, dynamic=dynamic)
    with pytest.warns(fusion.FusionWarning, match="behind the last one"):
        result = fused(torch.arange(10.0))
    torch.testing.assert_close(result, program(torch.arange(10.0)))
    for size in (12, 11, 13):
        torch.testing.assert_close(fused(torch.arange(float(size))), program(torch.arange(float(size))))
    assert fusion.report(fused).kernels
