"""Lowers distances between rows, and products of three tensors: reductions over an axis that no result has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import FloorDiv, axis_symbol
from fusion.lowering.ir.expr import IndexValue
from fusion.lowering.registry import lowers
from fusion.lowering.rules.assembly import placed
from fusion.lowering.rules.formula import Term, absolute, call, eq, literal, maximum, minimum, ne, sqrt, where
from fusion.lowering.rules.promotion import combine, rounded, widen
from fusion.lowering.rules.reduction import fold
from fusion.lowering.rules.view import unsqueeze
from fusion.lowering.value import Value, broadcast_shapes, broadcast_to

aten = torch.ops.aten


def _all_pairs(ctx: Builder, x1: Value, x2: Value) -> tuple[Value, Value]:
    """Broadcast rows [.., p, m] and [.., r, m] against each other: both as [.., p, r, m]."""
    return unsqueeze(ctx, widen(x1), -2), unsqueeze(ctx, widen(x2), -3)


def _norm(ctx: Builder, gaps: Value, p: float, dtype: torch.dtype) -> Value:
    """The p-norm of non-negative numbers along the last dimension."""
    over = [gaps.rank - 1]
    if gaps.shape[-1] == 0:
        raise Unsupported("distances of rows without elements")
    if math.isinf(p):
        return rounded(fold(ctx, "max", [gaps], over), dtype)
    parts = {
        0.0: lambda a: ne(a, 0).to(a.dtype),
        1.0: lambda a: a,
        2.0: lambda a: a * a,
    }.get(float(p), lambda a: call("pow", a, p))
    total = fold(ctx, "sum", [combine(parts, gaps)], over)
    if p == 2:
        total = combine(sqrt, total)
    elif p not in (0, 1):
        total = combine(lambda s: call("pow", s, 1 / p), total)
    return rounded(total, dtype)


def _gradient_of_gap(p: float, a: Term, b: Term, g: Term, d: Term) -> Term:
    """The gradient for element `a` of a row, given the gradient `g` of its distance `d` to a row with element `b`."""
    gap = a - b
    sign = call("sign", gap)
    if p == 0:
        return g * 0
    if p == 1:
        return g * sign
    if math.isinf(p):
        return where(eq(absolute(gap), d), g * sign, 0)
    if p == 2:
        return where(eq(d, 0), 0, g * gap / d)
    slope = sign * call("pow", absolute(gap), p - 1) * g / call("pow", d, p - 1)
    nowhere = eq(d, 0) | eq(gap, 0) if p < 1 else eq(d, 0)
    return where(nowhere, 0, slope)


def _zeros_like(like: Value) -> Value:
    return Value(like.shape, like.dtype, like.device, literal(0, like.dtype))


@lowers(aten._cdist_forward.default)
def cdist(ctx: Builder, x1: Value, x2: Value, p: float, compute_mode: int | None) -> Value:
    """The p-norm of the difference of each two rows."""
    gaps = combine(lambda a, b: absolute(a - b), *_all_pairs(ctx, x1, x2))
    return _norm(ctx, gaps, p, x1.dtype)


@lowers(aten._cdist_backward.default)
def cdist_backward(ctx: Builder, grad: Value, x1: Value, x2: Value, p: float, distances: Value) -> Value:
    """The gradient for x1, also where it is broadcast: 0 where two rows are equal."""
    a, b = _all_pairs(ctx, x1, x2)
    g, d = (unsqueeze(ctx, widen(value), -1) for value in (grad, distances))
    shape = broadcast_shapes([a.shape, b.shape, g.shape])
    if 0 in shape:
        return _zeros_like(x1)
    full = [broadcast_to(value, shape) for value in (a, b, g, d)]
    total = fold(ctx, "sum", [combine(partial(_gradient_of_gap, p), *full)], [len(shape) - 2])
    return rounded(total, x1.dtype)


# Among the rows of one matrix: pairs are numbered (0, 1), (0, 2), …, (1, 2), … ------------------------------------


MANY_ROWS = 64
"""Rows beyond which a CPU's library, which enumerates pairs in order, beats computing the pair of each result."""


def _refuse_many(x: Value, p: float) -> None:
    """Leave many rows to the library where it has a vectorised loop for this norm.

    On a CPU, distances of 1000 rows took 10 to 18 times as long generated, gradients 8 to 22 times; powers 0.4 times.
    """
    if x.device.type == "cpu" and p in (1.0, 2.0, math.inf) and not (x.shape[0].is_Integer and x.shape[0] <= MANY_ROWS):
        raise Unsupported("the library takes the pairs of many rows in their order")


@lowers(aten._pdist_forward.default)
def pdist(ctx: Builder, x: Value, p: float = 2.0) -> Value:
    """The p-norm of the difference of each two rows of a matrix [n, m]: n(n - 1)/2 numbers."""
    _refuse_many(x, p)
    n, m = x.shape
    shape = (FloorDiv(n * (n - 1), 2), m)
    if shape[0] == 0:
        return Value(shape[:1], x.dtype, x.device, literal(0, x.dtype))
    pair, middle = Term(IndexValue(axis_symbol(0))), Term(literal(n, torch.float64)) - 0.5
    first = (middle - sqrt(middle * middle - 2 * pair.to(torch.float64) - 1)).to(torch.int64)
    second = pair - n * first + call("floordiv", first * (first + 1), 2) + first + 1
    one, other = (widen(x.view(shape, [row.expr, axis_symbol(1)])) for row in (first, second))
    return _norm(ctx, combine(lambda a, b: absolute(a - b), one, other), p, x.dtype)


@lowers(aten._pdist_backward.default)
def pdist_backward(ctx: Builder, grad: Value, x: Value, p: float, distances: Value) -> Value:
    """For each row, the sum over the pairs that contain it."""
    _refuse_many(x, p)
    n, m = x.shape
    if 0 in grad.shape or m == 0:
        return _zeros_like(x)
    shape = (n, m, n)
    row, column, other = (axis_symbol(k) for k in range(3))
    own, against = (Term(IndexValue(at)) for at in (row, other))
    low, high = minimum(own, against), maximum(own, against)
    pair = low * n - call("floordiv", low * (low + 1), 2) + high - low - 1
    distinct = ne(Term(IndexValue(row - other)), 0)
    g, d = (placed(widen(value), shape, [pair.expr], distinct) for value in (grad, distances))
    wide = widen(x)
    a, b = (Term(wide.view(shape, [at, column]).expr) for at in (row, other))
    term = where(distinct, _gradient_of_gap(p, a, b, g, d), 0)
    total = fold(ctx, "sum", [Value(shape, term.dtype, x.device, term.expr)], [2])
    return rounded(total, x.dtype)


@lowers(aten._trilinear.default)
def trilinear(
    ctx: Builder,
    i1: Value,
    i2: Value,
    i3: Value,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Value:
    """Σ over `sumdim` of the product of three tensors, each with dimensions of size 1 inserted."""
    wide = []
    for value, dims in ((i1, expand1), (i2, expand2), (i3, expand3)):
        spread = widen(value)
        for dim in sorted(dims):
            spread = unsqueeze(ctx, spread, dim)
        wide.append(spread)
    shape = broadcast_shapes([value.shape for value in wide])
    product = combine(lambda a, b, c: a * b * c, *(broadcast_to(value, shape) for value in wide))
    return rounded(fold(ctx, "sum", [product], sorted(sumdim)), i1.dtype)
