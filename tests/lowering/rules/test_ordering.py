"""Sorted rows and membership against eager, with ties, NaN, infinities and zeros of either sign."""

from __future__ import annotations

import math

import pytest
import torch

from fusion.lowering.interpret import run_program
from fusion.lowering.rules.ordering import LONGEST_SORTED, MOST_TESTED
from tests.lowering.lowered import calls, check, lowered

ODD = torch.tensor(
    [[3.0, math.nan, -0.0, 1.0, 0.0, math.inf, 1.0], [-math.inf, 2.0, 2.0, math.nan, math.nan, 0.0, -0.0]]
)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sort_of_floats(dtype, descending):
    x = ODD.to(dtype)
    program = check(lambda x: torch.sort(x, dim=1, descending=descending, stable=True), x)
    values, places = run_program(program, [x])
    want = torch.sort(x, dim=1, descending=descending, stable=True)
    assert torch.equal(places, want.indices)
    assert torch.equal(values.signbit(), want.values.signbit())


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_sort_of_integers_with_ties(dtype, dim):
    x = torch.randint(0, 5, (4, 9, 6), generator=torch.Generator().manual_seed(1)).to(dtype)
    for descending in (False, True):
        check(lambda x: torch.sort(x, dim=dim, descending=descending, stable=True), x)  # noqa: B023
    extremes = torch.tensor([torch.iinfo(torch.int64).min, 0, torch.iinfo(torch.int64).max])
    check(torch.sort, extremes)


def test_sort_of_non_contiguous_and_small_tensors():
    x = torch.randn(8, 5, 3).permute(2, 0, 1)[:, ::2]
    for dim in range(3):
        check(lambda x: torch.sort(x, dim), x)  # noqa: B023
    for shape in ((), (1,), (0,), (3, 0), (0, 3)):
        check(torch.sort, torch.randn(shape))


def test_long_rows_are_left_to_the_library():
    assert not calls(lowered(torch.sort, torch.randn(2, LONGEST_SORTED)))
    check(torch.sort, torch.randn(2, LONGEST_SORTED + 1), leaves=["sort.default"])


@pytest.mark.parametrize("invert", [False, True])
def test_membership(invert):
    x = torch.randint(0, 9, (4, 5))
    check(lambda x, t: torch.isin(x, t, invert=invert), x, torch.tensor([[1, 3], [8, 3]]))
    check(lambda x: torch.isin(x, 4, invert=invert), x)
    check(lambda x, t: torch.isin(x, t, invert=invert), ODD, torch.tensor([0.0, math.nan, math.inf]))
    check(lambda x, t: torch.isin(x, t, invert=invert), x, torch.empty(0, dtype=torch.int64))


def test_large_sets_are_left_to_the_library():
    x = torch.arange(5)
    check(torch.isin, x, torch.arange(MOST_TESTED))
    check(torch.isin, x, torch.arange(3, MOST_TESTED + 4), leaves=["isin.Tensor_Tensor"])
