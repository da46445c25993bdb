"""Lowers calls without tensor operands: constants and ranges, which stay expressions and take no memory.

Shape, dtype and device are taken from eager's fake tensor.  Uninitialised memory (`empty`) has no value: it is
allocated, unless it has no elements.
"""

from __future__ import annotations

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import axis_symbol
from fusion.lowering.ir.expr import Expr, IndexValue, make_cast
from fusion.lowering.ir.sizes import sizes_of
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import Term, eq, literal, where
from fusion.lowering.rules.promotion import Argument, convert, term_of, widened
from fusion.lowering.value import Value, broadcast_to

aten, prims = torch.ops.aten, torch.ops.prims


def filled(ctx: Builder, expr: Expr) -> Value:
    """Return `expr` over the shape, and converted to the dtype, of the call being lowered."""
    meta = ctx.current.meta["val"]
    return Value(sizes_of(meta.shape), meta.dtype, meta.device, make_cast(expr, meta.dtype))


def _number(ctx: Builder, value: object) -> Expr:
    if not isinstance(value, (bool, int, float, sympy.Expr)):
        raise Unsupported(f"fill with {value!r}")
    return literal(value, ctx.current.meta["val"].dtype)


@lowers(aten.full.default, aten.full_like.default, aten.fill.Scalar, lazy=True)
def full(ctx: Builder, like: object, fill_value: Argument, **options: object) -> Value:
    """One number everywhere."""
    return filled(ctx, _number(ctx, fill_value))


@lowers(aten.new_full.default, lazy=True)
def new_full(ctx: Builder, like: Value, size: object, fill_value: Argument, **options: object) -> Value:
    """One number everywhere."""
    return filled(ctx, _number(ctx, fill_value))


@lowers(
    *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default),
    *(aten._efficientzerotensor.default,),
    lazy=True,
)
def zeros(ctx: Builder, like: object, *rest: object, **options: object) -> Value:
    """0 everywhere."""
    return filled(ctx, _number(ctx, 0))


@lowers(
    *(aten.empty.memory_format, aten.empty_permuted.default, aten.empty_strided.default),
    *(aten.new_empty_strided.default,),
    lazy=True,
)
def empty(ctx: Builder, like: object, *rest: object, **options: object) -> Value:
    """Uninitialised memory."""
    if 0 not in ctx.current.meta["val"].shape:
        return ctx.memory()
    return filled(ctx, _number(ctx, 0))


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default, lazy=True)
def ones(ctx: Builder, like: object, *rest: object, **options: object) -> Value:
    """1 everywhere."""
    return filled(ctx, _number(ctx, 1))


@lowers(aten.scalar_tensor.default, prims.scalar_tensor.default, lazy=True)
def scalar_tensor(ctx: Builder, value: Argument, *rest: object, **options: object) -> Value:
    """A 0-d tensor."""
    return filled(ctx, _number(ctx, value))


@lowers(aten.fill.Tensor, lazy=True)
def fill(ctx: Builder, x: Value, value: Value) -> Value:
    """The 0-d tensor `value` everywhere."""
    if value.device != x.device:
        raise Unsupported(f"fill of a tensor on {x.device} from {value.device}")
    return convert(broadcast_to(value, x.shape), x.dtype)


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step, lazy=True)
def arange(ctx: Builder, *bounds: int | float | sympy.Expr, **options: object) -> Value:
    """start, start + step, …"""
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    return _progression(ctx, start, step)


@lowers(prims.iota.default, lazy=True)
def iota(
    ctx: Builder,
    length: int | sympy.Expr,
    *,
    start: int | sympy.Expr,
    step: int | sympy.Expr,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> Value:
    """start, start + step, …"""
    return _progression(ctx, start, step)


def _progression(ctx: Builder, start: int | float | sympy.Expr, step: int | float | sympy.Expr) -> Value:
    """Integers exactly, from bounds truncated to integers; floats in float64, as eager does on a CPU."""
    if ctx.current.meta["val"].dtype.is_floating_point and (isinstance(start, float) or isinstance(step, float)):
        position = Term(make_cast(IndexValue(axis_symbol(0)), torch.float64))
        return filled(ctx, (start + position * step).expr)
    first, by = (number if isinstance(number, sympy.Expr) else sympy.Integer(int(number)) for number in (start, step))
    return filled(ctx, IndexValue(first + axis_symbol(0) * by))


@lowers(
    *(aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor),
    lazy=True,
)
def linspace(ctx: Builder, start: Argument, end: Argument, steps: int | sympy.Expr, **options: object) -> Value:
    """`steps` numbers from start to end, both exact: each half is computed from its own end."""
    dtype = ctx.current.meta["val"].dtype
    if not dtype.is_floating_point or any(isinstance(n, sympy.Expr) for n in (start, end)):
        raise Unsupported("linspace of integers, or between symbolic bounds")
    compute, shape = widened(dtype), (sympy.sympify(steps),)
    first, last = (term_of(n, shape, compute) for n in (start, end))
    return filled(ctx, spaced(first, last, sympy.sympify(steps)).expr)


def spaced(first: Term, last: Term, steps: sympy.Expr, *, once: bool = False) -> Term:
    """Return the numbers of `linspace`, over the first axis; with `once`, each is rounded once, as by an FMA."""
    if steps == 1:
        return first
    compute = first.dtype
    count = Term(literal(steps, compute))
    position = Term(make_cast(IndexValue(axis_symbol(0)), compute))
    step, wide = (last - first) / (count - 1), torch.float64 if once else compute
    from_first = first.to(wide) + step.to(wide) * position.to(wide)
    from_last = last.to(wide) - step.to(wide) * (count - position - 1).to(wide)
    return where(position * 2 + 1 < count, from_first, from_last).to(compute)


@lowers(aten.eye.default, aten.eye.m, lazy=True)
def eye(ctx: Builder, n: int | sympy.Expr, *rest: object, **options: object) -> Value:
    """1 on the diagonal, 0 elsewhere."""
    row, column = Term(IndexValue(axis_symbol(0))), Term(IndexValue(axis_symbol(1)))
    return filled(ctx, eq(row, column).expr)
