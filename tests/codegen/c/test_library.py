"""Functions of C's library: scalar, in full and narrower lanes, and in remainder loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusion
from fusion.codegen.c.text.library import vector_functions

FUNCTIONS = (
    *(torch.exp2, torch.expm1, torch.log, torch.log2, torch.log10, torch.log1p, torch.erfc),
    *(torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan),
    *(torch.sinh, torch.cosh, torch.tanh, torch.asinh, torch.acosh, torch.atanh),
    *(lambda x: x**1.7, lambda x: torch.atan2(x, x + 0.3)),
)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-40, 1e9, -1e9, 88.0, float("inf"), -float("inf"), float("nan"))


def every_function(x: Tensor, wide: Tensor) -> list[tuple[Tensor, ...]]:
    """Each function in vector lanes, in lanes next to wider ones, and on the elements of a column."""
    return [(f(x), f(x).double() + wide, f(x[:, 0])) for f in FUNCTIONS]


@pytest.mark.skipif(not vector_functions(), reason="there is no libmvec here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_of_equal_numbers_are_equal(dtype: torch.dtype) -> None:
    """Wherever they are computed: forms for 16, 8 and 4 lanes and for one number would differ in last bits."""
    torch.manual_seed(0)
    numbers = torch.cat([torch.tensor(SPECIAL), torch.randn(60), torch.rand(60) * 30]).to(dtype)
    x = numbers[:, None].repeat(1, 40)[:, :31]
    wide = torch.zeros(1, 31, dtype=torch.float64)
    fused = fusion.fuse(every_function, options={"target": "c", "strict": True})
    for actual, expected in zip(fused(x, wide), every_function(x, wide), strict=True):
        rows, widened, column = actual
        torch.testing.assert_close(rows, expected[0], equal_nan=True)
        alone = column[:, None].expand_as(rows)
        assert torch.equal(rows.nan_to_num(7.0), alone.nan_to_num(7.0))
        assert torch.equal(widened.nan_to_num(7.0), (alone.double() + 0.0).nan_to_num(7.0))
