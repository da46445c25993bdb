"""Lowers sorting of short rows, and membership in small sets.

An element's rank in its row is the number of elements before it: one sum over the row for each.  The element at a
position is the one of that rank.  Both take n² comparisons, which short rows can afford and which fuse with surrounding
operations; longer rows are left to the library's sort.  NaN comes after every number, and the sort is always stable, as
on a CPU.
"""

from __future__ import annotations

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, axis_symbol
from fusion.lowering.ir.expr import IndexValue
from fusion.lowering.ir.scalar_ops import identity
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import Term, eq, isnan, literal, where
from fusion.lowering.rules.promotion import Argument, combine, convert, rounded, widen
from fusion.lowering.rules.reduction import fold
from fusion.lowering.value import Shape, Value, reshape

aten = torch.ops.aten

LONGEST_SORTED = 64
"""The longest row that is sorted here."""

MOST_TESTED = 128
"""The largest set that each element is compared with one by one."""


@lowers(aten.sort.default)
def sort(ctx: Builder, x: Value, dim: int = -1, descending: bool = False) -> tuple[Value, ...]:
    """(the elements along `dim` in order, their positions before)."""
    return sort_stable(ctx, x, stable=True, dim=dim, descending=descending)


@lowers(aten.sort.stable)
def sort_stable(
    ctx: Builder, x: Value, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Value, ...]:
    """(the elements along `dim` in order, their positions before)."""
    if x.rank == 0:
        return x, Value((), torch.int64, x.device, literal(0, torch.int64))
    dim %= x.rank
    keys, ranks = keys_and_ranks(ctx, x, dim, descending=descending)
    return chosen(ctx, x, keys, ranks, dim, x.shape[dim])


def keys_and_ranks(ctx: Builder, x: Value, dim: int, *, descending: bool = False) -> tuple[Value, Value]:
    """(the keys by which x is compared, the rank of each element in its row along `dim`)."""
    length = x.shape[dim]
    if not length.is_Integer or length > LONGEST_SORTED:
        raise Unsupported("a sort of long rows")
    keys = convert(x, torch.uint8) if x.dtype is torch.bool else widen(x)
    return keys, ctx.map(_ranks(ctx, keys, dim, descending=descending))


def chosen(
    ctx: Builder, x: Value, keys: Value, ranks: Value, dim: int, count: sympy.Expr, first: Value | None = None
) -> tuple[Value, Value]:
    """(the elements of each row with the ranks 0, 1, … below `count`, their positions).

    With `first`, which has one number for each row and size 1 along `dim`, ranks are counted from there.
    """
    numbers = _numbers(x, dim, count)
    if first is not None:
        numbers = combine(lambda n, by: n + by, numbers, spread(first, dim))
    at = apart(ranks, dim), numbers
    lowest = identity("max", keys.dtype)
    values_at = combine(lambda p, k, v: where(eq(p, k), v, lowest), *at, apart(keys, dim))
    values = rounded(fold(ctx, "max", [values_at], [dim + 1]), x.dtype)
    counted = Value(x.shape, torch.int64, x.device, IndexValue(axis_symbol(dim)))
    positions_at = combine(lambda p, k, i: where(eq(p, k), i, 0), *at, apart(counted, dim))
    return values, fold(ctx, "sum", [positions_at], [dim + 1])


def apart(x: Value, dim: int) -> Value:
    """Insert a dimension of size 1 before `dim`."""
    return reshape(x, (*x.shape[:dim], ONE, *x.shape[dim:]))


def spread(x: Value, dim: int) -> Value:
    """Insert a dimension of size 1 after `dim`."""
    return reshape(x, (*x.shape[: dim + 1], ONE, *x.shape[dim + 1 :]))


def _numbers(x: Value, dim: int, count: sympy.Expr) -> Value:
    """Return 0, 1, … below `count` along `dim`, with a dimension of size 1 behind."""
    shape: Shape = tuple(count if k == dim else ONE for k in range(x.rank))
    return spread(Value(shape, torch.int64, x.device, IndexValue(axis_symbol(dim))), dim)


def _ranks(ctx: Builder, keys: Value, dim: int, *, descending: bool) -> Value:
    """Return the number of elements before each in the order of its row."""
    shape = (*keys.shape[: dim + 1], keys.shape[dim], *keys.shape[dim + 1 :])
    own, other = (IndexValue(axis_symbol(k)) for k in (dim, dim + 1))
    earlier = Value(shape, torch.bool, keys.device, (Term(other) < Term(own)).expr)

    def before(a: Term, b: Term, first: Term) -> Term:
        """Whether b comes before a."""
        ahead, equal = (b > a if descending else b < a), eq(a, b)
        if a.dtype.is_floating_point:
            a_nan, b_nan = isnan(a), isnan(b)
            ahead = ahead | ((b_nan & ~a_nan) if descending else (a_nan & ~b_nan))
            equal = equal | (a_nan & b_nan)
        return (ahead | (equal & first)).to(torch.int64)

    counted = combine(before, spread(keys, dim), apart(keys, dim), earlier)
    return fold(ctx, "sum", [counted], [dim + 1])


@lowers(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)
def isin(
    ctx: Builder, elements: Argument, tests: Argument, *, assume_unique: bool = False, invert: bool = False
) -> Value:
    """Whether each element is one of `tests`."""
    x, among = (_as_tensor(arg, other) for arg, other in ((elements, tests), (tests, elements)))
    count = sympy.Mul(*among.shape)
    if not count.is_Integer or count > MOST_TESTED:
        raise Unsupported("membership in a large set")
    if x.dtype is not among.dtype:
        raise Unsupported(f"membership of {x.dtype} in {among.dtype}")
    pairs = combine(eq, reshape(x, (*x.shape, ONE)), reshape(among, (count,)))
    is_member = fold(ctx, "any", [pairs], [x.rank])
    return combine(lambda a: ~a, is_member) if invert else is_member


def _as_tensor(arg: Argument, other: Argument) -> Value:
    """Return a number as a 0-d tensor on the device of `other`."""
    if isinstance(arg, Value):
        return arg
    assert isinstance(other, Value)
    if not isinstance(arg, (bool, int)) and not other.dtype.is_floating_point:
        raise Unsupported(f"membership of {arg!r} in {other.dtype}")
    return Value((), other.dtype, other.device, literal(arg, other.dtype))
