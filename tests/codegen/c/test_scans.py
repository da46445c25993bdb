"""Scans in C, compiled, run and compared with eager: along rows, along columns, between folds."""

from __future__ import annotations

import pytest
import sympy
import torch

from fusion.lowering.ir.expr import IndexValue
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Loop, Prefix, Role, Stmt, Store
from tests.codegen.c.kernels import F32, I64, REDUCED, WHOLE, assert_close_to_exact, axis, i0, r0, run
from tests.codegen.kernels.making import load

NAMES = {
    "sum": torch.cumsum,
    "prod": torch.cumprod,
    "logsumexp": torch.logcumsumexp,
    "max": lambda x, dim: torch.cummax(x, dim)[0],
    "argmax": lambda x, dim: torch.cummax(x, dim)[1],
    "min": lambda x, dim: torch.cummin(x, dim)[0],
    "argmin": lambda x, dim: torch.cummin(x, dim)[1],
}
SPECIAL = torch.tensor([0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1.0, 1.0, -1.0])


def scanned(name: str, x: torch.Tensor, dim: int, role: Role) -> torch.Tensor:
    """`name` of a matrix along `dim`, by a kernel of its own."""
    rows, columns = x.shape
    offset = columns * i0 + r0 if dim == 1 else columns * r0 + i0
    value = load("x", offset, x.dtype)
    place = name.startswith("arg")
    args = (value, IndexValue(r0)) if place else (value,)
    scan = Prefix("p", name, args, r0, I64 if place else x.dtype)
    body: tuple[Stmt, ...] = (scan, Store("out", offset, scan.ref))
    out = torch.empty(rows, columns, dtype=scan.dtype)
    sizes = (rows, columns) if dim == 1 else (columns, rows)
    body = body if role is WHOLE else (Loop((r0,), body),)
    source = run({"x": x}, {"out": out}, [axis(i0, sizes[0]), axis(r0, sizes[1], role)], *body)
    assert ("omp simd" in source) == (dim == 0)  # lanes run across the scanned axis, never along it
    return out


@REDUCED
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_floats(name: str, dim: int, role: Role) -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(70, 300).to(dtype)
        assert_close_to_exact(scanned(name, x, dim, role), NAMES[name](x, dim), NAMES[name](x.double(), dim))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_special_values(name: str, dim: int) -> None:
    x = SPECIAL[torch.randint(0, len(SPECIAL), (40, 40), generator=torch.Generator().manual_seed(0))]
    result, eager = scanned(name, x, dim, WHOLE), NAMES[name](x, dim)
    torch.testing.assert_close(result, eager, equal_nan=True)
    if name in ("max", "min"):
        assert torch.equal(torch.signbit(result.nan_to_num(1)), torch.signbit(eager.nan_to_num(1)))


@pytest.mark.parametrize("dtype", [torch.int32, I64])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "logsumexp"])
def test_integers(name: str, dtype: torch.dtype) -> None:
    x = torch.randint(-5, 5, (30, 50)).to(dtype)
    eager = NAMES[name](x, 1)
    assert torch.equal(scanned(name, x, 1, WHOLE), eager.to(I64 if name.startswith("arg") else dtype))


@REDUCED
@pytest.mark.parametrize("dim", [0, 1])
def test_a_scan_between_folds(dim: int, role: Role) -> None:
    """exp(x - max) is summed to each point, and divided by its own sum: the second loop scans again."""
    x = torch.randn(60, 90)
    offset: sympy.Expr = 90 * i0 + r0 if dim == 1 else 90 * r0 + i0
    top = Fold("top", "max", (load("x", offset),), (r0,), F32)
    args = (op("exp", op("sub", load("x", offset), top.ref)),)
    first, again = (Prefix(name, "sum", args, r0, F32) for name in ("first", "again"))
    total = Fold("total", "sum", (first.ref,), (r0,), F32)
    last = first if role is WHOLE else again
    store = Store("out", offset, op("truediv", last.ref, total.ref))
    body: tuple[Stmt, ...] = (top, first, total, store)
    if role is not WHOLE:
        body = (Loop((r0,), (top,)), Loop((r0,), (first, total)), Loop((r0,), (again, store)))

    def formula(x: torch.Tensor) -> torch.Tensor:
        c = (x - x.amax(dim, keepdim=True)).exp().cumsum(dim)
        return c / c.sum(dim, keepdim=True)

    out = torch.empty_like(x)
    sizes = (60, 90) if dim == 1 else (90, 60)
    run({"x": x}, {"out": out}, [axis(i0, sizes[0]), axis(r0, sizes[1], role)], *body)
    assert_close_to_exact(out, formula(x), formula(x.double()))
