"""Rows that are folded and columns that are summed by one kernel, in C."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.codegen.c import target
from fusion.schedule.reductions import column_sums
from tests.fusion.schedule.rows_and_columns import PROGRAMS, compare, drawn, gradients, layer_norm, rms_norm

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WIDTH = 48
compare_in_c = partial(compare, target="c")


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of ten rows of float32."""
    monkeypatch.setattr(target, "HELD_PART", 10 * WIDTH * 4)
    monkeypatch.setattr(column_sums, "_LEAST_ROW", 2)


def crossed(function: object) -> list[str]:
    """Return the sources of kernels that fold the rows of a part, and then sum its columns."""
    sources = [kernel.source for kernel in fusion.report(function).kernels]
    return [source for source in sources if re.search(r"folded\d+\[", source) and "sum" in source]


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    function = compare_in_c(PROGRAMS[name], *drawn(120, WIDTH if dtype is not F64 else WIDTH // 2, dtype=dtype))
    assert len(crossed(function)) == 1


@pytest.mark.parametrize("shape", [(2, 61, 47), (3, 5, 8, 40), (127, 48), (256, 33)], ids=str)
def test_the_last_part_may_be_shorter(shape: tuple[int, ...]) -> None:
    function = compare_in_c(layer_norm, *drawn(*shape, dtype=F32))
    assert len(crossed(function)) == 1


def test_a_shorter_part_ends_its_loops() -> None:
    """Lanes test nothing: neither loads nor stores have conditions."""
    (source,) = crossed(compare_in_c(rms_norm, *drawn(127, WIDTH, dtype=F32)))
    assert re.search(r"const int64_t r0_end0 = imin\(\d+, 127 - \d+\*i0\);", source)
    assert "r0 < r0_end0" in source
    body = source[source.index("r0_end0") :]
    assert " ? " not in body and "if (" not in body
    assert body.count("#pragma omp simd") >= 2


def test_symbolic_numbers_of_rows() -> None:
    function = compare_in_c(layer_norm, *drawn(127, WIDTH, dtype=F32), symbolic=True)
    for rows in (50, 2, 7, 400):
        tensors = drawn(rows, WIDTH, dtype=F32)
        exact = gradients(layer_norm, *(each.double() for each in tensors))
        for mine, wanted in zip(gradients(function, *tensors), exact, strict=True):
            torch.testing.assert_close(mine.double(), wanted, rtol=1e-4, atol=1e-4)
    assert len(crossed(function)) == 1


def test_transposed_rows() -> None:
    x, *_, upstream = drawn(WIDTH, 127, dtype=F32)
    compare_in_c(layer_norm, x.mT, *drawn(127, WIDTH, dtype=F32)[1:3], upstream.mT)


def test_wide_rows_stay_apart() -> None:
    """A part has at least eight rows."""
    assert not crossed(compare_in_c(layer_norm, *drawn(64, 4 * WIDTH, dtype=F32)))


def test_columns_that_are_summed_beside_their_rows_in_forward() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = x.softmax(-1)
        return weights, weights.sum(0), x.amax(-1)

    function = fusion.fuse(program, options={"target": "c", "strict": True})
    x = drawn(127, WIDTH, dtype=F32)[0]
    for mine, wanted in zip(function(x), program(x.double()), strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-5)
    assert len(crossed(function)) == 1


def test_columns_of_which_a_part_is_summed() -> None:
    """The condition of the sum says nothing about the rows that are folded."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.softmax(-1), torch.where(torch.arange(127)[:, None] < 20, x, 0.0).sum(0)

    def padded(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.softmax(-1), F.pad(x[:20], (0, 0, 0, 107)).sum(0)

    x = drawn(127, WIDTH, dtype=F32)[0]
    for each in (program, padded):
        function = fusion.fuse(each, options={"target": "c", "strict": True})
        for mine, wanted in zip(function(x), each(x.double()), strict=True):
            torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-5)
        assert fusion.report(function).kernels


def test_nan_and_infinities_stay_in_their_rows_and_columns() -> None:
    x, weight, bias, upstream = drawn(127, WIDTH, dtype=F32)
    x[3, 5], x[10, 7], upstream[20, 9] = float("nan"), float("inf"), float("nan")
    function = fusion.fuse(layer_norm, options={"target": "c", "strict": True})
    expected = gradients(layer_norm, x, weight, bias, upstream)
    for mine, wanted in zip(gradients(function, x, weight, bias, upstream), expected, strict=True):
        assert torch.equal(mine.isnan(), wanted.isnan())
    assert len(crossed(function)) == 1


@pytest.mark.parametrize("rows", [100, 1000, 127])
def test_sums_in_parts_without_folds_of_rows(rows: int) -> None:
    """Parts of a sum of few columns end with the last row, too."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(0), (x * x).amax(0)

    x = torch.randn(rows * 1013, 3, generator=torch.Generator().manual_seed(0))
    function = fusion.fuse(program, options={"target": "c", "strict": True})
    for mine, wanted in zip(function(x), program(x.double()), strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-3)
    assert fusion.report(function).kernels


@pytest.mark.usefixtures("one_thread")
def test_products_with_a_vector_beside_sums_of_columns_on_one_thread() -> None:
    def both(x: torch.Tensor, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ vector, torch.div(x, -3, rounding_mode="trunc").nansum(0)

    args = torch.randn(12, 1, 16), torch.randn(16)
    fused = fusion.fuse(both, options={"target": "c", "strict": True})
    for mine, eager in zip(fused(*args), both(*args), strict=True):
        torch.testing.assert_close(mine, eager)
    assert fusion.report(fused).kernels
