"""Sorting short rows, and membership in short sets.

An element's place in its sorted row is how many elements come before it: one sum over the row for each.  The element at
a place is the one whose place that is.  Both are n² comparisons, which short rows can afford and which fuse with what
surrounds them; longer rows are left to the library's sort.  NaN comes after every number, and equal elements keep their
order, as on a CPU, whether or not that is asked for.
"""

from __future__ import annotations

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.expr import IndexValue
from fusion.lowering.indexing import ONE, axis_symbol
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import Term, eq, isnan, literal, where
from fusion.lowering.rules.promotion import Argument, combine, convert, rounded, widen
from fusion.lowering.rules.reduction import fold
from fusion.lowering.scalar_ops import identity
from fusion.lowering.value import Shape, Value, reshape

aten = torch.ops.aten

LONGEST = 64
"""Elements of a row that is sorted here."""

MOST_TESTED = 128
"""Elements of a set in which each element is looked for, one by one."""


@lowers(aten.sort.default)
def sort(ctx: Builder, x: Value, dim: int = -1, descending: bool = False) -> tuple[Value, ...]:
    """(the elements along `dim` in order, where they were)."""
    return sort_stable(ctx, x, stable=True, dim=dim, descending=descending)


@lowers(aten.sort.stable)
def sort_stable(
    ctx: Builder, x: Value, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Value, ...]:
    """(the elements along `dim` in order, where they were)."""
    if x.rank == 0:
        return x, Value((), torch.int64, x.device, literal(0, torch.int64))
    dim %= x.rank
    keys, places = placed_in_order(ctx, x, dim, descending=descending)
    return chosen(ctx, x, keys, places, dim, x.shape[dim])


def placed_in_order(ctx: Builder, x: Value, dim: int, *, descending: bool = False) -> tuple[Value, Value]:
    """(x as it is compared, the place of each element in its sorted row along `dim`)."""
    length = x.shape[dim]
    if not length.is_Integer or length > LONGEST:
        raise Unsupported("a sort of long rows")
    keys = convert(x, torch.uint8) if x.dtype is torch.bool else widen(x)
    return keys, ctx.map(_places(ctx, keys, dim, descending=descending))


def chosen(
    ctx: Builder, x: Value, keys: Value, places: Value, dim: int, count: sympy.Expr, first: Value | None = None
) -> tuple[Value, Value]:
    """(those of the elements of each row whose places are 0, 1, … up to `count`, where they were).

    With `first`, which has one number for each row and size 1 along `dim`, places are counted from there.
    """
    numbers = _numbers(x, dim, count)
    if first is not None:
        numbers = combine(lambda n, by: n + by, numbers, spread(first, dim))
    at = apart(places, dim), numbers
    lowest = identity("max", keys.dtype)
    held = combine(lambda p, k, v: where(eq(p, k), v, lowest), *at, apart(keys, dim))
    values = rounded(fold(ctx, "max", [held], [dim + 1]), x.dtype)
    counted = Value(x.shape, torch.int64, x.device, IndexValue(axis_symbol(dim)))
    found = combine(lambda p, k, i: where(eq(p, k), i, 0), *at, apart(counted, dim))
    return values, fold(ctx, "sum", [found], [dim + 1])


def apart(x: Value, dim: int) -> Value:
    """x with its dimension `dim` moved one on, behind one of size 1."""
    return reshape(x, (*x.shape[:dim], ONE, *x.shape[dim:]))


def spread(x: Value, dim: int) -> Value:
    """x with a dimension of size 1 behind `dim`."""
    return reshape(x, (*x.shape[: dim + 1], ONE, *x.shape[dim + 1 :]))


def _numbers(x: Value, dim: int, count: sympy.Expr) -> Value:
    """The places 0, 1, … up to `count` along `dim`, with a dimension of size 1 behind."""
    shape: Shape = tuple(count if k == dim else ONE for k in range(x.rank))
    return spread(Value(shape, torch.int64, x.device, IndexValue(axis_symbol(dim))), dim)


def _places(ctx: Builder, keys: Value, dim: int, *, descending: bool) -> Value:
    """How many elements of its row come before each."""
    shape = (*keys.shape[: dim + 1], keys.shape[dim], *keys.shape[dim + 1 :])
    own, other = (IndexValue(axis_symbol(k)) for k in (dim, dim + 1))
    earlier = Value(shape, torch.bool, keys.device, (Term(other) < Term(own)).expr)

    def before(a: Term, b: Term, first: Term) -> Term:
        """Does b come before a?"""
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
    """Is each element one of `tests`?"""
    x, among = (_as_tensor(arg, other) for arg, other in ((elements, tests), (tests, elements)))
    count = sympy.Mul(*among.shape)
    if not count.is_Integer or count > MOST_TESTED:
        raise Unsupported("membership in a large set")
    if x.dtype is not among.dtype:
        raise Unsupported(f"membership of {x.dtype} in {among.dtype}")
    pairs = combine(eq, reshape(x, (*x.shape, ONE)), reshape(among, (count,)))
    found = fold(ctx, "any", [pairs], [x.rank])
    return combine(lambda a: ~a, found) if invert else found


def _as_tensor(arg: Argument, other: Argument) -> Value:
    """A number as a 0-d tensor beside `other`."""
    if isinstance(arg, Value):
        return arg
    assert isinstance(other, Value)
    if not isinstance(arg, (bool, int)) and not other.dtype.is_floating_point:
        raise Unsupported(f"membership of {arg!r} in {other.dtype}")
    return Value((), other.dtype, other.device, literal(arg, other.dtype))
