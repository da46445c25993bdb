"""Small matrices in C, whose elements share most of their work: it is done once for each."""

from __future__ import annotations

import pytest
import torch

from fusion.lowering.ir.expr import Expr, IndexValue, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Store
from tests.codegen.c.kernels import F32, axis, i0, i1, i2, run
from tests.codegen.kernels.making import load


def picked(size: int) -> Expr:
    """Select the root of the sum of the row at which i1 and i2 are equal."""
    total, result = const(1.0, F32), const(0.0, F32)
    for k in range(size):
        total = op("add", total, op("exp", load("x", size * i0 + k)))
        here = op("eq", IndexValue(i1 + i2), const(k, torch.int64))
        result = op("where", here, op("sqrt", total), result)
    return result


def expected(x: torch.Tensor, size: int) -> torch.Tensor:
    roots = (1 + x.exp().cumsum(1)).sqrt()
    at = torch.arange(size)[:, None] + torch.arange(size)
    return torch.where(at < size, roots[:, at.clamp(max=size - 1)], 0.0)


@pytest.mark.parametrize(("count", "size", "once"), [(300, 5, True), (300, 4, False), (7, 5, False), (300, 9, False)])
def test_expressions_shared_by_the_elements_of_a_matrix(count: int, size: int, once: bool) -> None:
    x, out = torch.randn(count, size), torch.empty(count, size, size)
    store = Store("out", size * size * i0 + size * i1 + i2, picked(size))
    source = run({"x": x}, {"out": out}, [axis(i0, count), axis(i1, size), axis(i2, size)], store)
    assert (source.index("sqrt") < source.rindex("int64_t i1 = ")) is once
    torch.testing.assert_close(out, expected(x, size))
