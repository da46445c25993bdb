"""Rows that are folded and columns that are summed by one kernel, under Triton's interpreter."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.codegen.triton import target
from fusion.codegen.triton.devices.h200 import H200
from fusion.schedule.reductions import column_sums
from tests.fusion.schedule.rows_and_columns import PROGRAMS, compare, drawn, gradients, layer_norm

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
ROWS = 36  # six for each multiprocessor


@pytest.fixture(autouse=True)
def _small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that short matrices fill."""
    monkeypatch.setattr(target, "H200", replace(H200, multiprocessors=6))
    monkeypatch.setattr(column_sums, "_LEAST_ROWS", 1)
    monkeypatch.setattr(column_sums, "_LEAST_ROW", 2)
    monkeypatch.setattr(column_sums, "_PROGRAMS", 1)


def is_crossed(source: str) -> bool:
    """Does a kernel hold rows in a loop, fold them, and add their columns?"""
    folds = re.search(r"\n        \w+ = tl\.(sum|max|reduce)\([^\n]*, 1(, \w+)?\)", source)
    return bool(folds) and "_lanes +=" in source and "\n        tl.store(" in source


def crossed(function: object) -> list[str]:
    return [kernel.source for kernel in fusion.report(function).kernels if is_crossed(kernel.source)]


compare_on_triton = partial(compare, target="triton")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    function = compare_on_triton(PROGRAMS[name], *drawn(ROWS, 40, dtype=dtype))
    assert len(crossed(function)) == 1


@pytest.mark.parametrize("shape", [(2, 18, 17), (18, 2, 33), (2, 3, 6, 8), (96, 64)], ids=str)
def test_rows_along_several_axes(shape: tuple[int, ...]) -> None:
    function = compare_on_triton(layer_norm, *drawn(*shape, dtype=F32))
    assert len(crossed(function)) == 1


@pytest.mark.parametrize("shape", [(37, 40), (5, 7, 24), (41, 256)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_last_part_may_be_shorter(name: str, shape: tuple[int, ...]) -> None:
    function = compare_on_triton(PROGRAMS[name], *drawn(*shape, dtype=F32))
    assert len(crossed(function)) == 1


def test_symbolic_numbers_of_rows() -> None:
    function = compare_on_triton(layer_norm, *drawn(37, 40, dtype=F32), symbolic=True)
    for rows in (50, 2, 7, 36):
        tensors = drawn(rows, 40, dtype=F32)
        exact = gradients(layer_norm, *(each.double() for each in tensors))
        for mine, wanted in zip(gradients(function, *tensors), exact, strict=True):
            torch.testing.assert_close(mine.double(), wanted, rtol=1e-4, atol=1e-4)
    assert len(crossed(function)) == 1


def test_transposed_rows() -> None:
    x, *_, upstream = drawn(40, ROWS, dtype=F32)
    compare_on_triton(layer_norm, x.mT, *drawn(ROWS, 40, dtype=F32)[1:3], upstream.mT)


def test_columns_that_are_summed_beside_their_rows_in_forward() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = x.softmax(-1)
        return weights, weights.sum(0), x.amax(-1)

    function = fusion.fuse(program, options={"target": "triton"})
    x = drawn(ROWS, 50, dtype=F32)[0]
    for mine, wanted in zip(function(x), program(x.double()), strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-5)
    assert len(crossed(function)) == 1


@pytest.mark.parametrize("rows", [ROWS, 37])
def test_sums_along_either_axis(rows: int) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sum(0), x.sum(1), x.mT.sum(0)

    function = fusion.fuse(program, options={"target": "triton"})
    x = drawn(rows, 50, dtype=F32)[0]
    for mine, wanted in zip(function(x), program(x.double()), strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-5)
    assert fusion.report(function).kernels


def test_columns_of_which_a_part_is_summed() -> None:
    """The sum has a condition of its own, which says nothing about the rows that are folded."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        part = torch.where(torch.arange(ROWS)[:, None] < 20, x, 0.0)
        return x.softmax(-1), part.sum(0)

    def padded(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.softmax(-1), F.pad(x[:20], (0, 0, 0, ROWS - 20)).sum(0)

    x = drawn(ROWS, 50, dtype=F32)[0]
    for each in (program, padded):
        function = fusion.fuse(each, options={"target": "triton"})
        for mine, wanted in zip(function(x), each(x.double()), strict=True):
            torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-5)
        assert fusion.report(function).kernels


def test_sums_that_rows_need_stay_apart() -> None:
    def program(x: Tensor) -> Tensor:
        return (x - x.sum(0)).softmax(-1)

    function = fusion.fuse(program, options={"target": "triton"})
    x = drawn(ROWS, 50, dtype=F32)[0]
    torch.testing.assert_close(function(x).double(), program(x.double()), rtol=1e-4, atol=1e-5)
    assert not crossed(function)


def test_nan_and_infinities_stay_in_their_rows_and_columns() -> None:
    x, weight, bias, upstream = drawn(ROWS, 40, dtype=F32)
    x[3, 5], x[10, 7], upstream[20, 9] = float("nan"), float("inf"), float("nan")
    function = fusion.fuse(layer_norm, options={"target": "triton"})
    for mine, wanted in zip(
        gradients(function, x, weight, bias, upstream), gradients(layer_norm, x, weight, bias, upstream), strict=True
    ):
        assert torch.equal(mine.isnan(), wanted.isnan())
