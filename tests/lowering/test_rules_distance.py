"""Distances between rows and products of three against eager: no call is left."""

from __future__ import annotations

import pytest
import torch

from tests.lowering.lowered import check

aten = torch.ops.aten


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 37 % 19 - 9) / 8).view(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_distances(p, dtype):
    x, y = rows(2, 5, 3, dtype=dtype), rows(2, 4, 3, dtype=dtype) + 1
    y[0, 1] = x[0, 2]
    check(lambda x, y: aten._cdist_forward(x, y, p, 2), x, y)
    found = aten._cdist_forward(x, y, p, 2)
    check(lambda g, x, y, d: aten._cdist_backward(g, x, y, p, d), rows(2, 5, 4, dtype=dtype), x, y, found)


def test_a_product_of_three():
    check(torch.nn.functional.bilinear, rows(3, 4), rows(3, 5), rows(2, 4, 5), rows(2))
    check(lambda a, b, c: aten._trilinear(a, b, c, [1, 3], [0], [1, 2], [2, 3]), rows(3, 5), rows(2, 5, 4), rows(3, 4))
