"""Lowers scans: running sums, products, extremes and log-sum-exp along one dimension.

16-bit floats are carried in float32 and rounded at each point, integers narrower than int32 in int32; sums and products
of integers are int64 unless asked otherwise, as in eager.  Along a dimension of one
element at most, a scan is the value.
"""

from __future__ import annotations

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, ZERO, axis_symbol
from fusion.lowering.ir.expr import Const, IndexValue, const
from fusion.lowering.ir.scalar_ops import SCANNED, ScanName
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import literal
from fusion.lowering.rules.promotion import convert, rounded, widen
from fusion.lowering.value import Value

aten = torch.ops.aten


def _scanned(value: Value) -> Value:
    """Convert `value` to a dtype that is scanned."""
    wide = widen(value)
    return wide if wide.dtype in SCANNED else convert(wide, torch.int32)


def _is_trivial(x: Value, dim: int) -> bool:
    """Return whether the dimension has at most one element, or x none."""
    return x.rank == 0 or x.shape[dim] in (ZERO, ONE) or sympy.Mul(*x.shape) == 0


def _scan(ctx: Builder, op: ScanName, x: Value, dim: int) -> Value:
    """Scan x by `op` along `dim`, in the dtype of x."""
    if _is_trivial(x, dim):
        return x
    return rounded(ctx.scan(op, [_scanned(x)], dim % x.rank), x.dtype)


def _accumulated(ctx: Builder, op: ScanName, x: Value, dim: int, dtype: torch.dtype | None) -> Value:
    out = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    if out is torch.bool:
        raise Unsupported(f"running {op} as bool")
    return _scan(ctx, op, convert(x, out), dim)


@lowers(aten.cumsum.default)
def cumsum(ctx: Builder, x: Value, dim: int, *, dtype: torch.dtype | None = None) -> Value:
    """Σ of x up to each point; 0 for a constant integer 0, as differences of positions may be."""
    if isinstance(x.expr, Const) and not x.dtype.is_floating_point and not x.expr.value and dtype is not torch.bool:
        return Value(x.shape, dtype or torch.int64, x.device, const(0, dtype or torch.int64))
    return _accumulated(ctx, "sum", x, dim, dtype)


@lowers(aten.cumprod.default)
def cumprod(ctx: Builder, x: Value, dim: int, *, dtype: torch.dtype | None = None) -> Value:
    """Π of x up to each point."""
    return _accumulated(ctx, "prod", x, dim, dtype)


@lowers(aten.logcumsumexp.default)
def logcumsumexp(ctx: Builder, x: Value, dim: int) -> Value:
    """log Σ exp(x) up to each point."""
    if not x.dtype.is_floating_point:
        raise Unsupported(f"logcumsumexp of {x.dtype}")
    return _scan(ctx, "logsumexp", x, dim)


@lowers(aten.cummax.default)
def cummax(ctx: Builder, x: Value, dim: int) -> tuple[Value, ...]:
    """(the largest element up to each point, its last position); NaN is above everything."""
    return _scan(ctx, "max", x, dim), _position_of(ctx, "argmax", x, dim)


@lowers(aten.cummin.default)
def cummin(ctx: Builder, x: Value, dim: int) -> tuple[Value, ...]:
    """(the smallest element up to each point, its last position); NaN is below everything."""
    return _scan(ctx, "min", x, dim), _position_of(ctx, "argmin", x, dim)


def _position_of(ctx: Builder, op: ScanName, x: Value, dim: int) -> Value:
    if _is_trivial(x, dim):
        return Value(x.shape, torch.int64, x.device, literal(0, torch.int64))
    positions = Value(x.shape, torch.int64, x.device, IndexValue(axis_symbol(dim % x.rank)))
    return ctx.scan(op, [_scanned(x), positions], dim % x.rank)
