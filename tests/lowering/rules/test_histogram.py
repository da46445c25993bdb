"""Histograms against eager, with NaN, ties with edges, weights and densities: no call remains."""

from __future__ import annotations

import math

import pytest
import torch

from tests.lowering.lowered import check

FLOATS = [torch.float32, torch.float64]
GENERATOR = torch.Generator().manual_seed(4)
ROWS = torch.randn(40, 15, generator=GENERATOR, dtype=torch.float64)
TIES = (torch.arange(200) % 23 - 11).double() / 8  # edges of 22 bins are among them, exactly


@pytest.mark.parametrize("dtype", FLOATS)
def test_counts(dtype):
    odd = torch.tensor([0.0, 1.0, math.nan, 2.0, -0.5, math.inf, 3.0, 3.0]).to(dtype)
    for x in (ROWS.to(dtype), ROWS.t()[::2].to(dtype), TIES.to(dtype), TIES[3].to(dtype)):
        check(lambda x: torch.histc(x, 7, -1, 1), x)
        check(lambda x: torch.histc(x), x)
    check(lambda x: torch.histc(x, 3, 0, 3), odd)
    check(lambda x: torch.histc(x, 4), torch.ones(5, dtype=dtype))
    check(lambda x: torch.histc(x, 4), torch.ones(0, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("density", [False, True])
def test_histograms(dtype, density):
    weight = torch.rand(40, 15, generator=GENERATOR, dtype=torch.float64).to(dtype)
    edges = torch.tensor([-1.1, -0.5, 0.0, 0.1, 0.9], dtype=dtype)
    x = ROWS.to(dtype)
    check(lambda x: torch.histogram(x, 6, density=density), x)
    check(lambda x, w: torch.histogram(x, 6, range=(-1.0, 2.0), weight=w, density=density), x, weight)
    check(lambda x, e, w: torch.histogram(x, e, weight=w, density=density), x, edges, weight)
    for size in (3, 10, 22):
        check(lambda x: torch.histogram(x, size, density=density), TIES.to(dtype))  # noqa: B023
    check(lambda x, e: torch.histogram(x, e, density=density), TIES.to(dtype), edges)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("density", [False, True])
def test_histograms_of_rows(dtype, density):
    x = ROWS.view(40, 5, 3)[:, ::2].to(dtype)
    weight = torch.rand(40, 3, generator=GENERATOR, dtype=torch.float64).to(dtype)
    edges = [torch.tensor(e, dtype=dtype) for e in ([-1.0, 0.0, 1.0], [-2.0, 0.5], [-3.0, -1.0, 0.0, 1.0])]
    check(lambda x, w: torch.histogramdd(x, [2, 3, 4], weight=w, density=density), x, weight)
    limits = [-1.0, 1.0, 0.0, 2.0, -2.0, 2.0]
    check(lambda x: torch.histogramdd(x, [2, 3, 1], range=limits, density=density), x)
    check(lambda x, w, *e: torch.histogramdd(x, e, weight=w, density=density), x, weight, *edges)


def test_16_bit_floats_are_left_to_the_library():
    check(lambda x: torch.histc(x, 4, -1, 1), ROWS.bfloat16(), leaves=["histc.default"])
