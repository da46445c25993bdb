"""Lowers selection by rank in short rows: the largest few, the k-th smallest, medians, the most frequent.

An element's rank in its row is the number of elements before it (`ordering`), NaN after every number; the element with
the requested rank is selected.  Of equal elements the first ones count as smaller, in either direction; eager does not
define which of them it selects.
"""

from __future__ import annotations

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import Term, call, eq, isnan, literal, maximum, where
from fusion.lowering.rules.ordering import apart, chosen, keys_and_ranks, spread
from fusion.lowering.rules.promotion import combine
from fusion.lowering.rules.reduction import fold
from fusion.lowering.value import Value, reshape

aten = torch.ops.aten


def _single(x: Value) -> tuple[Value, Value]:
    """(a 0-d tensor, the position of its only element)."""
    return x, Value((), torch.int64, x.device, literal(0, torch.int64))


def _of_rank(ctx: Builder, x: Value, dim: int, rank: Value, keepdim: bool) -> tuple[Value, Value]:
    """(the element of each row with the rank in `rank`, of size 1 along `dim`; its position)."""
    keys, ranks = keys_and_ranks(ctx, x, dim)
    values, positions_at = chosen(ctx, x, keys, ranks, dim, ONE, rank)
    if keepdim:
        return values, positions_at
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    return reshape(values, shape), reshape(positions_at, shape)


@lowers(aten.topk.default)
def topk(
    ctx: Builder, x: Value, k: int | sympy.Expr, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, ...]:
    """(the k largest or smallest elements along `dim` in order, their positions)."""
    if x.rank == 0:
        return _single(x)
    dim %= x.rank
    keys, ranks = keys_and_ranks(ctx, x, dim, descending=largest)
    return chosen(ctx, x, keys, ranks, dim, sympy.sympify(k))


@lowers(aten.kthvalue.default)
def kthvalue(ctx: Builder, x: Value, k: int | sympy.Expr, dim: int = -1, keepdim: bool = False) -> tuple[Value, ...]:
    """(the k-th smallest element along `dim`, counted from one; its position)."""
    if x.rank == 0:
        return _single(x)
    dim %= x.rank
    shape = tuple(ONE for _ in x.shape)
    rank = Value(shape, torch.int64, x.device, literal(sympy.sympify(k) - 1, torch.int64))
    return _of_rank(ctx, x, dim, rank, keepdim)


def _median(ctx: Builder, x: Value, dim: int, keepdim: bool, *, skips: bool) -> tuple[Value, Value]:
    """The middle element that is no NaN, the lower one of two; but the first NaN, unless NaNs are skipped."""
    length = x.shape[dim]
    if length == 0:
        raise Unsupported("the median of nothing")
    middle = (length - 1) // 2
    if not x.dtype.is_floating_point:
        shape = tuple(ONE for _ in x.shape)
        return _of_rank(ctx, x, dim, Value(shape, torch.int64, x.device, literal(middle, torch.int64)), keepdim)
    numbers = fold(ctx, "sum", [combine(lambda a: (~isnan(a)).to(torch.int64), x)], [dim], keepdim=True)

    def rank(count: Term) -> Term:
        if skips:
            return call("floordiv", maximum(count - 1, 0), 2)
        return where(count < length, count, middle)

    return _of_rank(ctx, x, dim, combine(rank, numbers), keepdim)


@lowers(aten.mode.default)
def mode(ctx: Builder, x: Value, dim: int = -1, keepdim: bool = False) -> tuple[Value, ...]:
    """(the most frequent element along `dim`, the smallest of several; its last position).  A NaN equals no other."""
    if x.rank == 0:
        return _single(x)
    dim %= x.rank
    length = x.shape[dim]
    if length == 0:
        raise Unsupported("the mode of nothing")
    keys, ranks = keys_and_ranks(ctx, x, dim)
    pairs = combine(lambda a, b: eq(a, b).to(torch.int64), spread(keys, dim), apart(keys, dim))
    counts = ctx.map(combine(lambda n: maximum(n, 1), fold(ctx, "sum", [pairs], [dim + 1])))
    most = fold(ctx, "max", [counts], [dim], keepdim=True)
    begins = combine(lambda n, top, rank: where(eq(n, top), rank, int(length)), counts, most, ranks)
    first = fold(ctx, "min", [begins], [dim], keepdim=True)
    return _of_rank(ctx, x, dim, combine(lambda begin, n: begin + n - 1, first, most), keepdim)


@lowers(aten.median.dim)
def median(ctx: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, ...]:
    """(the median along `dim`, or NaN if there is one; its index)."""
    return _single(x) if x.rank == 0 else _median(ctx, x, dim % x.rank, keepdim, skips=False)


@lowers(aten.nanmedian.dim)
def nanmedian(ctx: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, ...]:
    """(the median along `dim` of the elements that are not NaN; its index)."""
    return _single(x) if x.rank == 0 else _median(ctx, x, dim % x.rank, keepdim, skips=True)


@lowers(aten.median.default)
def median_of_all(ctx: Builder, x: Value) -> Value:
    """The median of all elements, or NaN if there is one."""
    return _median(ctx, reshape(x, (sympy.Mul(*x.shape),)), 0, False, skips=False)[0]


@lowers(aten.nanmedian.default)
def nanmedian_of_all(ctx: Builder, x: Value) -> Value:
    """The median of all elements that are no NaN."""
    return _median(ctx, reshape(x, (sympy.Mul(*x.shape),)), 0, False, skips=True)[0]
