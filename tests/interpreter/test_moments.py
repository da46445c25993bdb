"""Mean and variance of long columns relative to one of their elements, in one loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusion
from fusion.lowering.ir.scalar_ops import HALVES

ROWS, COLUMNS = 3000, 24


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x.float(), 0, correction=0)
    return variance, mean


def drawn(dtype: torch.dtype, shift: float = 0.0) -> Tensor:
    return (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7)) + shift).to(dtype)


def computed(x: Tensor) -> tuple[Tensor, Tensor]:
    fused = fusion.fuse(moments, options={"target": "triton", "strict": True})
    variance, mean = fused(x)
    (kernel,) = fusion.report(fused).kernels
    assert kernel.source.count("for r0 in range") == (1 if x.dtype in HALVES else 2)
    return variance, mean


@pytest.mark.parametrize("shift", [0.0, 100.0, -3e4])
def test_moments_are_those_of_float64(shift: float) -> None:
    x = drawn(torch.bfloat16, shift)
    variance, mean = computed(x)
    exact = torch.var_mean(x.double(), 0, correction=0)
    torch.testing.assert_close(variance.double(), exact[0], rtol=2e-6, atol=1e-9)
    torch.testing.assert_close(mean.double(), exact[1], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("row", [0, 1000, 2999])
def test_an_outlier_is_no_pivot(row: int) -> None:
    """It is as far from the mean as an element can be: relative to it, the variance would lose 11 bits."""
    x = drawn(torch.bfloat16)
    x[row] = 1e4
    variance, mean = computed(x)
    exact = torch.var_mean(x.double(), 0, correction=0)
    torch.testing.assert_close(variance.double(), exact[0], rtol=2e-6, atol=0)
    torch.testing.assert_close(mean.double(), exact[1], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, -3e34])
def test_columns_of_equal_numbers_have_no_variance(value: float) -> None:
    x = torch.full((ROWS, COLUMNS), value).bfloat16()
    variance, mean = computed(x)
    assert torch.equal(variance, torch.zeros(COLUMNS))
    torch.testing.assert_close(mean, x[0].float(), rtol=2e-7, atol=0)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("row", [0, 2999])
def test_infinities_and_nans_stay(value: float, row: int) -> None:
    x = drawn(torch.bfloat16)
    x[row, 5] = value
    variance, mean = computed(x)
    assert variance.isnan().nonzero().flatten().tolist() == [5]
    assert torch.isfinite(mean).logical_not().nonzero().flatten().tolist() == [5]


ROWS_OF_THEM, LONG = 288, 40_960
"""Enough rows for a program each, and the elements of one that no program holds."""


def norm(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[1:])


@pytest.mark.parametrize(("shift", "outlier"), [(300.0, None), (-3.0, 0)])
def test_norms_of_long_rows_are_those_of_float64(shift: float, outlier: int | None) -> None:
    x = (torch.randn(ROWS_OF_THEM, LONG, generator=torch.Generator().manual_seed(7)) + shift).bfloat16()
    x[1] = 0.7
    if outlier is not None:
        x[2, outlier] = 1e4
    fused = fusion.fuse(norm, options={"target": "triton", "strict": True})
    out = fused(x)
    (kernel,) = fusion.report(fused).kernels
    assert kernel.source.count("for r") == 2
    assert torch.equal(out[1], torch.zeros(LONG).bfloat16())
    exact = norm(x.double())
    error, theirs = ((result.double() - exact).square().mean(1).sqrt() for result in (out, norm(x)))
    assert bool((error <= 1.01 * theirs).all())
