"""Distances between rows, and triple products, against eager: calls remain only for pairs of many rows."""

from __future__ import annotations

import pytest
import torch

from tests.lowering.lowered import calls, check

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
    result = aten._cdist_forward(x, y, p, 2)
    check(lambda g, x, y, d: aten._cdist_backward(g, x, y, p, d), rows(2, 5, 4, dtype=dtype), x, y, result)


def test_distances_of_broadcast_operands():
    x, y = rows(3, 1, 5, 4), rows(2, 6, 4) + 0.5
    result = aten._cdist_forward(x, y, 2.0, 2)
    grad = rows(*result.shape)
    check(lambda g, x, y, d: aten._cdist_backward(g, x, y, 2.0, d), grad, x, y, result)
    check(lambda g, x, y, d: aten._cdist_backward(g, x, y, 2.0, d), grad[:, :, :, :0], x, y[:, :0], result[..., :0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_distances_among_the_rows_of_a_matrix(p, dtype):
    for count in (1, 2, 7, 40):
        x = rows(count, 3, dtype=dtype) + torch.arange(count, dtype=dtype)[:, None] / 64
        x[-1] = x[0]
        check(lambda x: aten._pdist_forward(x, p), x)
        result = aten._pdist_forward(x, p)
        check(lambda g, x, d: aten._pdist_backward(g, x, p, d), rows(*result.shape, dtype=dtype), x, result)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_pairs_of_many_rows_are_left_where_the_library_has_a_loop_of_vectors(p):
    x = rows(65, 3) + torch.arange(65)[:, None] / 64
    forward, backward = ([], []) if p == 3 else (["_pdist_forward.default"], ["_pdist_backward.default"])
    check(lambda x: aten._pdist_forward(x, p), x, leaves=forward)
    result = aten._pdist_forward(x, p)
    gradient = check(lambda g, x, d: aten._pdist_backward(g, x, p, d), rows(*result.shape), x, result, leaves=backward)
    assert set(calls(gradient).values()) <= {"the library takes the pairs of many rows in their order"}


def test_a_product_of_three():
    check(torch.nn.functional.bilinear, rows(3, 4), rows(3, 5), rows(2, 4, 5), rows(2))
    check(lambda a, b, c: aten._trilinear(a, b, c, [1, 3], [0], [1, 2], [2, 3]), rows(3, 5), rows(2, 5, 4), rows(3, 4))
