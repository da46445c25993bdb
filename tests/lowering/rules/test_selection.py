"""Selection by rank in short rows against eager, with NaN and infinities: no call remains."""

from __future__ import annotations

import math

import pytest
import torch

from fusion.lowering.interpret import run_program
from fusion.lowering.rules.ordering import LONGEST_SORTED
from tests.lowering.lowered import check, lowered

GENERATOR = torch.Generator().manual_seed(5)
ROWS = torch.stack([torch.randperm(9, generator=GENERATOR) - 4 for _ in range(12)]).view(3, 4, 9) / 4
ODD = torch.tensor(
    [
        [3.0, math.nan, -0.5, 1.0, math.inf],
        [-math.inf, 2.0, 1.0, 0.0, math.inf],
        [math.nan, 1.0, math.nan, math.nan, math.nan],
        [math.nan, math.nan, math.nan, math.nan, math.nan],
    ]
)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int8])
@pytest.mark.parametrize("largest", [False, True])
def test_the_largest_few(dtype, largest):
    x = (ROWS * 4).to(dtype)
    for dim, k in ((-1, 3), (2, 9), (1, 1)):
        check(lambda x: torch.topk(x, k, dim, largest), x.transpose(1, 2) if dim == 1 else x)  # noqa: B023
    check(lambda x: torch.topk(x, 0), x)
    check(lambda x: torch.topk(x, 1), x[0, 0, 0])


def test_the_largest_few_among_nan():
    program = lowered(lambda x: torch.topk(x, 3), ODD)
    values, places = run_program(program, [ODD])
    assert torch.equal(values.nan_to_num(9), torch.topk(ODD, 3).values.nan_to_num(9))
    assert torch.equal(ODD.gather(1, places).nan_to_num(9), values.nan_to_num(9))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_the_smallest_but_some(dtype):
    x = (ROWS * 4).to(dtype)
    for keepdim in (False, True):
        check(lambda x: torch.kthvalue(x, 4, keepdim=keepdim), x)  # noqa: B023
        check(lambda x: torch.kthvalue(x, 9, 1, keepdim=keepdim), x.transpose(1, 2))  # noqa: B023
    check(lambda x: torch.kthvalue(x, 1), x[0, 0, 0])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8])
@pytest.mark.parametrize("median", [torch.median, torch.nanmedian])
def test_medians(median, dtype):
    x = (ROWS * 4).to(dtype)
    for rows in (x, x[:, :, :8], x[:, ::2, 1:2]):
        check(lambda x: median(x, -1), rows)
        check(lambda x: median(x, 2, keepdim=True), rows)
    check(lambda x: median(x, 1), x.transpose(1, 2))
    check(median, x[0])
    check(median, x[0, 0, 0])


@pytest.mark.parametrize("median", [torch.median, torch.nanmedian])
def test_medians_among_nan(median):
    check(lambda x: median(x, 1), ODD[:3])
    check(lambda x: median(x, 1)[0], ODD)  # where eager finds the median of nothing but NaN is not defined
    check(median, ODD)
    check(median, ODD[3:])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.bool])
def test_the_most_frequent(dtype):
    x = ((ROWS * 4).to(torch.int64) % 3).to(dtype)
    for keepdim in (False, True):
        check(lambda x: torch.mode(x, keepdim=keepdim), x)  # noqa: B023
        check(lambda x: torch.mode(x, 1, keepdim=keepdim), x.transpose(1, 2))  # noqa: B023
    check(torch.mode, x[0, 0, 0])
    check(torch.mode, (ROWS * 4).to(dtype))  # each once


def test_the_most_frequent_among_nan():
    """Eager's sort does not order NaN: its result depends on their positions."""
    rows = torch.cat([ODD, ODD[:, 1:4]], 1)
    values, places = run_program(lowered(torch.mode, rows), [rows])
    torch.testing.assert_close(values, torch.tensor([-0.5, 0.0, 1.0, math.nan]), equal_nan=True)
    torch.testing.assert_close(rows.gather(1, places[:, None])[:, 0], values, equal_nan=True)


def test_long_rows_are_left_to_the_library():
    x = torch.randn(2, LONGEST_SORTED + 1)
    check(lambda x: torch.topk(x, 2), x, leaves=["topk.default"])
    check(lambda x: torch.kthvalue(x, 2), x, leaves=["kthvalue.default"])
    check(lambda x: (torch.median(x, 1), torch.nanmedian(x)), x, leaves=["median.dim", "nanmedian.default"])
    check(lambda x: torch.median(x, 0), x)
    check(torch.mode, x, leaves=["mode.default"])
