"""Exponents and neighbours of floats against eager, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from tests.lowering.lowered import check

NARROW = (torch.float32, torch.float16, torch.bfloat16)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of every magnitude, powers of two and their neighbours, the extremes, infinities and NaN."""
    info = torch.finfo(dtype)
    powers = torch.exp2(torch.arange(math.log2(info.smallest_normal * info.eps), math.log2(info.max), 1.0).double())
    odd = torch.tensor([0.0, -0.0, info.max, info.smallest_normal, math.inf, -math.inf, math.nan]).double()
    result = torch.cat([powers, powers * 1.3, powers * (1 - info.eps / 2), powers * (1 + info.eps), odd])
    return torch.cat([result, -result]).to(dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_mantissa_and_exponent(dtype):
    x = numbers(dtype)
    check(torch.frexp, x[x.isfinite()], tolerance=0.0)
    check(lambda x: torch.frexp(x)[0], x, tolerance=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours(dtype):
    x = numbers(dtype)
    for goal in (x.flip(0), torch.zeros_like(x), torch.full_like(x, math.inf), torch.full_like(x, -math.inf), x):
        check(torch.nextafter, x, goal, tolerance=0.0)


def test_float64_stays_a_library_call():
    x = torch.randn(3, dtype=torch.float64)
    check(torch.nextafter, x, x + 1, leaves=["nextafter.default"])
    check(torch.frexp, x, leaves=["frexp.Tensor"])
