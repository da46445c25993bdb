"""Lowers reductions of segments: runs of elements along a dimension, given by their lengths or first elements.

An element determines its segment by binary search and is folded into it; a gradient is read from there.  Before the
dimension of the segments, lengths have the dimensions of the data.  Elements in no segment are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, axis_symbol
from fusion.lowering.ir.expr import Index, IndexValue, guarded
from fusion.lowering.ir.requirements import Requirement
from fusion.lowering.ir.scalar_ops import JoinName, identity
from fusion.lowering.registry import lowers
from fusion.lowering.rules import reduction
from fusion.lowering.rules.collisions import JOINS, folded
from fusion.lowering.rules.formula import Term, eq, isnan, literal, maximum, ne, where
from fusion.lowering.rules.ordering import apart, spread
from fusion.lowering.rules.promotion import combine, convert, requiring, rounded, shaped_as, widen
from fusion.lowering.rules.scans import cumsum
from fusion.lowering.rules.search import searchsorted
from fusion.lowering.value import Shape, Value, axes_of, reshape

aten = torch.ops.aten

MOST_TESTED = 4096
"""The largest number of pairs of a segment and an element that are compared where scatters are not supported."""

SEGMENT_FOLDS: dict[str, JoinName] = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "prod": "prod"}


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments along the dimension `dim` of a tensor.

    Attributes:
        shape: the shape of a tensor with one element for each segment.
        sizes: the number of elements of each, int64, over the dimensions up to `dim`.
        own: the segment of each element of the tensor, int64, over the dimensions up to `dim`.
        inside: whether the element is in one.
    """

    dim: int
    shape: Shape
    sizes: Value
    own: Value
    inside: Term

    def place(self, like: Value) -> list[Index]:
        """Return the index of the segment of each element of `like`."""
        index: list[Index] = list(axes_of(like.shape))
        index[self.dim] = self.own.expr
        return index

    def read(self, value: Value, like: Value) -> Term:
        """Read `value` for the segment of each element of `like`; 0 where there is none."""
        return Term(guarded(value.view(like.shape, self.place(like)).expr, self.inside.expr))

    def spread(self, value: Value) -> Value:
        """Broadcast a value per segment, with the dimensions up to `dim`, over the dimensions after it."""
        return value.view(self.shape, [axis_symbol(k) for k in range(self.dim + 1)])

    def fold(self, ctx: Builder, op: JoinName, source: Value, start: float) -> Value:
        """Fold the sources of each segment, and `start`, by `op`."""
        pairs = self.shape[self.dim] * source.shape[self.dim]
        may_meet = ctx.wanted.scatters is None or op in ctx.wanted.scatters
        moves = ctx.wanted.invariant and op in ("sum", "prod")  # with the segments before it
        if not may_meet and not moves and pairs.is_Integer and pairs <= MOST_TESTED:
            return self._gathered(ctx, op, source, start)
        begin = Value(self.shape, source.dtype, source.device, literal(start, source.dtype))
        return folded(ctx, op, begin, self.place(source), source, self.inside)

    def _gathered(self, ctx: Builder, op: JoinName, source: Value, start: float) -> Value:
        """Fold as `fold` does, without a scatter: each segment reads all elements, and selects its own."""
        behind = (ONE,) * (source.rank - self.dim - 1)
        owned = combine(lambda own, inside: where(inside, own, -1), self.own, shaped_as(self.own, self.inside))
        segment = Value(self.shape, torch.int64, source.device, IndexValue(axis_symbol(self.dim)))
        neutral = identity(op, source.dtype)
        chosen = combine(
            lambda own, mine, x: where(eq(own, mine), x, neutral),
            apart(reshape(owned, (*owned.shape, *behind)), self.dim),
            spread(segment, self.dim),
            apart(source, self.dim),
        )
        begin = literal(start, source.dtype)
        return combine(lambda x: JOINS[op](Term(begin), x), reduction.fold(ctx, op, [chosen], [self.dim + 1]))


def _segments(ctx: Builder, data: Value, dim: int, lengths: Value | None, offsets: Value | None) -> Segments:
    given_by = lengths if lengths is not None else offsets
    if given_by is None or given_by.rank != dim + 1:
        raise Unsupported("segments given by indices")
    given_by = convert(given_by, torch.int64)
    if lengths is not None:
        count, sizes = given_by.shape[-1], given_by
        if count == 0:
            raise Unsupported("no segments")
        ends, first = cumsum(ctx, given_by, -1), None
    else:
        count, rows = given_by.shape[-1] - 1, axes_of(given_by.shape)[:-1]
        shape, last = (*given_by.shape[:-1], count), axis_symbol(dim)
        ends, begins = given_by.view(shape, [*rows, last + 1]), given_by.view(shape, [*rows, last])
        sizes = combine(lambda end, begin: end - begin, ends, begins)
        first = given_by.view((*given_by.shape[:-1], ONE), [*rows, sympy.Integer(0)])
    at = Value(data.shape[: dim + 1], torch.int64, data.device, IndexValue(axis_symbol(dim)))
    own = ctx.map(searchsorted(ctx, ends, at, right=True))
    inside = Term(own.expr) < count
    if first is not None:
        segment_begin = first.view(own.shape, [*axes_of(own.shape)[:-1], sympy.Integer(0)])
        inside = inside & (Term(at.expr) >= Term(segment_begin.expr))
    return Segments(dim, (*data.shape[:dim], count, *data.shape[dim + 1 :]), sizes, own, inside)


def _checked(ctx: Builder, lengths: Value, count: sympy.Expr) -> Value:
    """Return the lengths of segments, which may not be negative and have to add up to `count`."""
    lengths = requiring(Requirement.LENGTH, lambda each: each >= 0, convert(lengths, torch.int64))
    total = reduction.fold(ctx, "sum", [lengths], [lengths.rank - 1], keepdim=True)
    return requiring(Requirement.LENGTHS, lambda _, all_of_them: eq(all_of_them, count), lengths, total)


def _start(reduce: str, initial: float | None, dtype: torch.dtype) -> float:
    return float(identity(SEGMENT_FOLDS[reduce], dtype)) if initial is None else float(initial)


@lowers(aten.segment_reduce.default)
def segment_reduce(
    ctx: Builder,
    data: Value,
    reduce: str,
    *,
    lengths: Value | None = None,
    indices: Value | None = None,
    offsets: Value | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Value:
    """The sum, mean, product or an extreme of each segment and `initial`; the mean of no elements is NaN."""
    dim, wide = axis % data.rank, widen(data)
    if lengths is not None and not unsafe:
        lengths = _checked(ctx, lengths, data.shape[dim])
    segments = _segments(ctx, data, dim, lengths, offsets)
    total = segments.fold(ctx, SEGMENT_FOLDS[reduce], wide, _start(reduce, initial, wide.dtype))
    if reduce == "mean":
        nothing = float("nan") if initial is None else float(initial)

        def mean(t: Term, n: Term) -> Term:
            return where(n > 0, t / maximum(n, 1).to(t.dtype), nothing)

        total = combine(mean, total, segments.spread(segments.sizes))
    return rounded(total, data.dtype)


@lowers(aten._segment_reduce_backward.default)
def segment_reduce_backward(
    ctx: Builder,
    grad: Value,
    output: Value,
    data: Value,
    reduce: str,
    *,
    lengths: Value | None = None,
    offsets: Value | None = None,
    axis: int = 0,
    initial: float | None = None,
) -> Value:
    """The gradient of each element from that of its segment; 0 for elements in no segment."""
    wide = widen(data)
    segments = _segments(ctx, data, axis % data.rank, lengths, offsets)
    x, g, out = Term(wide.expr), segments.read(widen(grad), wide), segments.read(widen(output), wide)
    if reduce == "mean":
        size = segments.read(segments.spread(segments.sizes), wide)
        gradient = g / maximum(size, 1).to(g.dtype)
    elif reduce == "prod":
        gradient = _of_products(ctx, segments, wide, g, out, _start(reduce, initial, wide.dtype))
    elif reduce in ("max", "min"):
        hit = segments.inside & (isnan(x) | eq(x, out))
        hits = segments.fold(ctx, "sum", shaped_as(wide, hit.to(torch.int64)), 0)
        shared = segments.read(hits, wide)
        # eager divides only positive gradients among equal elements
        gradient = where(hit, where((shared > 1) & (g > 0), g / maximum(shared, 1).to(g.dtype), g), 0)
    else:
        gradient = g
    return rounded(shaped_as(wide, where(segments.inside, gradient, 0)), data.dtype)


def _of_products(ctx: Builder, segments: Segments, x: Value, g: Term, out: Term, start: float) -> Term:
    """The gradient of products: g times the product of the other elements, by division where that is possible."""
    own = Term(x.expr)
    zero, nan = eq(own, 0), isnan(own)
    odd = zero | nan
    rest = segments.read(segments.fold(ctx, "prod", shaped_as(x, where(odd, 1, own)), start), x)
    zeros, nans = (
        segments.read(segments.fold(ctx, "sum", shaped_as(x, test.to(torch.int64)), 0), x) - test.to(torch.int64)
        for test in (zero, nan)
    )
    others = where(ne(zeros, 0), rest * 0, rest)
    others = where(ne(nans, 0), float("nan"), others)
    return where(odd, g * others, g * out / where(odd, 1, own))
