"""Views at affine positions: which there are, and whether their elements share memory."""

from __future__ import annotations

import pytest
import sympy
import torch

from fusion.lowering.interpret.strided import affine, overlaps, strided_view
from tests.lowering.building import I0, I1, LENGTH


def test_factors_of_axes_may_be_sizes() -> None:
    assert affine(LENGTH * (I0 + 2) - I1, frozenset([I0, I1])) == {I0: LENGTH, I1: -1, sympy.Integer(1): 2 * LENGTH}
    assert affine(I0 * I1, frozenset([I0, I1])) is None
    assert affine(I0 * I1, frozenset([I0])) == {I0: I1}


def test_there_is_no_view_outside_or_backwards() -> None:
    x, box = torch.arange(12).view(3, 4), {I0: range(3), I1: range(1, 4)}
    assert strided_view(x, [I0, I1], box, {}) is not None
    assert strided_view(x, [I0, I1 + 1], box, {}) is None  # within the memory, and outside of the dimension
    assert strided_view(x, [I0, I1 - 2], box, {}) is None
    assert strided_view(x, [2 - I0, I1], box, {}) is None


@pytest.mark.parametrize(
    ("shape", "strides", "shared"),
    [((3, 4), (4, 1), False), ((3, 4), (1, 3), False), ((3, 4), (3, 1), True), ((3, 1), (0, 0), True), ((), (), False)],
)
def test_elements_that_share_memory(shape: tuple[int, ...], strides: tuple[int, ...], shared: bool) -> None:
    assert overlaps(torch.empty(20).as_strided(shape, strides)) is shared
