"""Lowers histograms: each element computes its bin along each dimension, and is added to it.

Bins of equal width are computed by a division, corrected by the neighbouring edges if these are part of the result; for
arbitrary edges a binary search is used.  The last bin includes its right edge, NaN is in none.  16-bit floats and
integers are refused, and so are edges of symbolic number.  A data-dependent range that is not finite fails the
launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, axis_symbol
from fusion.lowering.ir.expr import guarded
from fusion.lowering.ir.requirements import Requirement
from fusion.lowering.registry import lowers
from fusion.lowering.rules.collisions import folded
from fusion.lowering.rules.creation import spaced
from fusion.lowering.rules.formula import Term, absolute, call, eq, literal, maximum, minimum, where
from fusion.lowering.rules.places import laid_flat
from fusion.lowering.rules.promotion import combine, convert, requiring
from fusion.lowering.rules.reduction import fold
from fusion.lowering.value import Value, broadcast_to, reshape

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64)


def _check(x: Value) -> None:
    if x.dtype not in FLOATS:
        raise Unsupported(f"a histogram of {x.dtype}")


@dataclass(frozen=True, slots=True)
class Bins:
    """The bins along one dimension.

    Attributes:
        count: the number of bins.
        low, high: the outer edges, 0-d.
        edges: all edges; None where they are not needed.
        even: whether the bins have equal width.
    """

    count: int
    low: Value
    high: Value
    edges: Value | None
    even: bool

    def find(self, element: Value) -> tuple[Term, Term]:
        """(the bin of each element, int64; whether it is in one)."""
        x = Term(element.expr)
        low, high = (Term(broadcast_to(edge, element.shape).expr) for edge in (self.low, self.high))
        inside = (x >= low) & (x <= high)
        if self.even:
            bin_index = where(inside, (x - low) * self.count / (high - low), 0).to(torch.int64)
            if self.edges is not None:
                begin, end = maximum(bin_index - 1, 0), minimum(bin_index + 2, self.count + 1)
                bin_index = self._before(element, begin, end, 2) - 1
        else:
            begin, end = (Term(literal(number, torch.int64)) for number in (0, self.count + 1))
            bin_index = self._before(element, begin, end, (self.count + 1).bit_length()) - 1
        return minimum(bin_index, self.count - 1), inside

    def _before(self, element: Value, first: Term, end: Term, steps: int) -> Term:
        """Return the first of the edges in a range that is larger than the element, by `steps` bisections."""
        assert self.edges is not None
        left = end - first
        for _ in range(steps):
            half = call("floordiv", left, 2)
            exists = left > 0
            at = (first + half).expr
            edge = guarded(self.edges.view(element.shape, [at]).expr, exists.expr, safe=[at])
            beyond = exists & ~(Term(element.expr) < Term(edge))
            first = where(beyond, first + half + 1, first)
            left = where(beyond, left - half - 1, half)
        return first


def _number(value: float, like: Value) -> Value:
    return Value((), like.dtype, like.device, literal(value, like.dtype))


def _range(
    ctx: Builder, x: Value, limits: Sequence[float] | None, margin: float, requirement: Requirement
) -> tuple[Value, Value]:
    """Return the outer edges of bins for the 1-d `x`: `limits`, else its extremes; never equal."""
    if limits is not None:
        low, high = float(limits[0]), float(limits[1])
        widening = 0.0 if low != high else margin
        return _number(low - widening, x), _number(high + widening, x)
    if x.shape[0] == 0:
        return _number(0.0, x), _number(1.0, x)
    low_, high_ = (
        requiring(requirement, lambda edge: absolute(edge) < math.inf, fold(ctx, op, [x], [0])) for op in ("min", "max")
    )
    wider = combine(lambda a, b: where(eq(a, b), a * 0 + margin, 0), low_, high_)
    return ctx.map(combine(lambda a, by: a - by, low_, wider)), ctx.map(combine(lambda a, by: a + by, high_, wider))


def _even(
    ctx: Builder, x: Value, count: int, limits: Sequence[float] | None, requirement: Requirement, *, with_edges: bool
) -> Bins:
    """Return bins of equal width for the elements of the 1-d `x`; with `with_edges`, also their edges."""
    low, high = _range(ctx, x, limits, 1.0 if requirement is Requirement.HISTC_RANGE else 0.5, requirement)
    edges = None
    if with_edges:
        shape = (sympy.Integer(count + 1),)
        first, last = (Term(broadcast_to(edge, shape).expr) for edge in (low, high))
        edges = ctx.map(Value(shape, x.dtype, x.device, spaced(first, last, shape[0], once=True).expr))
    return Bins(count, low, high, edges, even=True)


def _between(edges: Value, x: Value) -> Bins:
    """Return the bins between ascending edges."""
    if edges.dtype is not x.dtype or not edges.shape[0].is_Integer or edges.shape[0] < 2:
        raise Unsupported("edges of another type or of unknown number")
    low, high = (edges.view((), [place]) for place in (sympy.Integer(0), edges.shape[0] - 1))
    return Bins(int(edges.shape[0]) - 1, low, high, edges, even=False)


def _counted(ctx: Builder, columns: Sequence[Value], bins: Sequence[Bins], weight: Value | None) -> Value:
    """Return how many rows, or how much weight, fall into each bin; `columns` holds the rows' elements, each 1-d."""
    like = columns[0]
    bins_of_rows = [each.find(column) for each, column in zip(bins, columns, strict=True)]
    inside = bins_of_rows[0][1]
    for _, test in bins_of_rows[1:]:
        inside = inside & test
    shape = tuple(sympy.Integer(each.count) for each in bins)
    zeros = Value(shape, like.dtype, like.device, literal(0, like.dtype))
    ones = Value(like.shape, like.dtype, like.device, literal(1, like.dtype))
    source = ones if weight is None else convert(reshape(weight, like.shape), like.dtype)
    return folded(ctx, "sum", zeros, [bin_index.expr for bin_index, _ in bins_of_rows], source, inside)


def _as_density(ctx: Builder, counts: Value, bins: Sequence[Bins]) -> Value:
    """Divide the share of each bin by its volume."""
    total = fold(ctx, "sum", [counts], list(range(counts.rank)))
    result = combine(lambda n, all_: n / all_, counts, total)
    for dim, each in enumerate(bins):
        assert each.edges is not None
        axis = axis_symbol(dim)
        widths = each.edges.view(counts.shape, [axis + ONE]), each.edges.view(counts.shape, [axis])
        result = combine(lambda n, right, left: n / (right - left), result, *widths)
    return result


def _finished(
    ctx: Builder, columns: Sequence[Value], bins: Sequence[Bins], weight: Value | None, density: bool
) -> Value:
    counts = _counted(ctx, columns, bins, weight)
    return _as_density(ctx, counts, bins) if density else counts


def _columns(x: Value) -> list[Value]:
    """Return the columns of x, flattened but for its last dimension."""
    _check(x)
    count = x.shape[-1]
    if not count.is_Integer:
        raise Unsupported("a histogram over a symbolic number of dimensions")
    rows = sympy.Mul(*x.shape[:-1])
    table = reshape(x, (rows, count))
    return [table.view((rows,), [axis_symbol(0), sympy.Integer(k)]) for k in range(int(count))]


@lowers(aten.histc.default)
def histc(ctx: Builder, x: Value, bins: int = 100, min: float = 0, max: float = 0) -> Value:
    """Count the elements in each of `bins` between two edges, or between the extremes if the edges are equal."""
    _check(x)
    flat = laid_flat(x)
    limits = (min, max) if min != max or flat.shape[0] == 0 else None
    return _counted(ctx, [flat], [_even(ctx, flat, bins, limits, Requirement.HISTC_RANGE, with_edges=False)], None)


@lowers(aten.histogram.bin_ct)
def histogram(
    ctx: Builder,
    x: Value,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Value | None = None,
    density: bool = False,
) -> tuple[Value, ...]:
    """(the number of elements in each of `bins`, their edges)."""
    _check(x)
    flat = laid_flat(x)
    even_bins = _even(ctx, flat, bins, range, Requirement.HISTOGRAM_RANGE, with_edges=True)
    assert even_bins.edges is not None
    return _finished(ctx, [flat], [even_bins], weight, density), even_bins.edges


@lowers(aten.histogram.bins_tensor)
def histogram_between(
    ctx: Builder, x: Value, bins: Value, *, weight: Value | None = None, density: bool = False
) -> tuple[Value, ...]:
    """(the number of elements between each two edges, the edges)."""
    _check(x)
    return _finished(ctx, [laid_flat(x)], [_between(bins, x)], weight, density), bins


def _grid(
    ctx: Builder, x: Value, bins: Sequence[int], limits: Sequence[float] | None
) -> tuple[list[Value], list[Bins]]:
    """(the columns of x, bins of equal width along each)."""
    columns = _columns(x)
    ranges = [None if limits is None else limits[2 * k : 2 * k + 2] for k, _ in enumerate(columns)]
    bins_of_columns = [
        _even(ctx, column, count, limits, Requirement.HISTOGRAM_RANGE, with_edges=True)
        for column, count, limits in zip(columns, bins, ranges, strict=True)
    ]
    return columns, bins_of_columns


@lowers(aten._histogramdd_bin_edges.default)
def bin_edges(
    ctx: Builder,
    x: Value,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    **counting: object,
) -> tuple[Value | None, ...]:
    """The edges of bins of equal width along each column, however elements are counted."""
    return tuple(each.edges for each in _grid(ctx, x, bins, range)[1])


@lowers(aten._histogramdd_from_bin_cts.default)
def histogram_of_rows(
    ctx: Builder,
    x: Value,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Value | None = None,
    density: bool = False,
) -> Value:
    """Count the rows in each bin of a grid of bins of equal width."""
    return _finished(ctx, *_grid(ctx, x, bins, range), weight, density)


@lowers(aten._histogramdd_from_bin_tensors.default)
def histogram_of_rows_between(
    ctx: Builder, x: Value, bins: Sequence[Value], *, weight: Value | None = None, density: bool = False
) -> Value:
    """Count the rows between the edges of each dimension."""
    return _finished(ctx, _columns(x), [_between(edges, x) for edges in bins], weight, density)
