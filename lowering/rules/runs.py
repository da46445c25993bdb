"""Sums scattered to places that ascend along their sources: each element sums the run of sources that name it.

The gradient of resampling by the nearest neighbour is such a sum: the place of a source is computed from its position
alone.  Where all positions are known, so are the places; where the runs begin at an affine quotient of the place, each
element finds its own, and nothing meets.  Input: a sum as `folded` takes it; None is returned where the places are
loaded, do not ascend, or have no such form, and where targets may disagree on how they round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.evaluate import Scope, evaluate
from fusion.lowering.expr import Cast, Const, Expr, Index, IndexValue, Load, Op, free_axes, postorder, rewrite
from fusion.lowering.indexing import ZERO, FloorDiv, axis_symbol, simplify, substitute
from fusion.lowering.indexing.substitution import as_expr
from fusion.lowering.program import Map
from fusion.lowering.rules.assembly import placed
from fusion.lowering.rules.formula import Term, both, where
from fusion.lowering.rules.promotion import combine, convert, rounded, widen, widened
from fusion.lowering.rules.reduction import fold
from fusion.lowering.value import Shape, Value, axis_bounds

LONGEST, MOST_TAPS = 1 << 16, 32
"""Sources along a dimension whose places are worked out, and sources that an element may have to sum."""

PLAIN = frozenset(
    {"mul", "floor", "trunc", "minimum", "maximum", "where", "neg", *("lt", "le", "gt", "ge", "eq", "ne")}
)
"""Operations on floats with one result on every target, whatever surrounds them."""


@dataclass(frozen=True, slots=True)
class Run:
    """The sources along `axis` that name an element: from ⌊(n·place + shift) / size⌋ on, `taps` at most.

    `even`: they are as many for each element.  The first run begins at 0, the last one ends at `count`.
    """

    axis: sympy.Symbol
    count: int
    size: int
    shift: int
    taps: int
    even: bool
    inner: bool  # the form holds inside alone, not at both ends

    def begin(self, place: sympy.Expr, further: sympy.Expr = ZERO) -> Index:
        """So many sources behind where the run of an element begins; behind the last element is where its run ends."""
        quotient = FloorDiv(place * self.count + self.shift, sympy.Integer(self.size))
        at = simplify(quotient, {}) + further
        if not self.inner:
            return at
        here, end = Term(IndexValue(place)), Term(IndexValue(self.count + further))
        first = Term(IndexValue(further))
        return where(here <= 0, first, where(here >= self.size, end, Term(IndexValue(at)))).expr


def summed_in_runs(ctx: Builder, x: Value, place: Sequence[Index], source: Value) -> Value | None:
    """x with the sources added at their places, or None where those are not in runs."""
    own = axis_bounds(source.shape)
    runs: dict[int, Run] = {}
    left = set(own)
    for dim, index in enumerate(place):
        if index in left and not isinstance(index, Expr):
            left.remove(index)  # the dimension is the source's own
            continue
        run = _run(ctx, index, x.shape[dim], own) if isinstance(index, Expr) else None
        if run is None or run.axis not in left:
            return None
        left.remove(run.axis)
        runs[dim] = run
    taps = sympy.Mul(*(run.taps for run in runs.values()))
    if left or not runs or taps > MOST_TAPS:
        return None
    return _gathered(ctx, x, place, source, runs)


def _gathered(ctx: Builder, x: Value, place: Sequence[Index], source: Value, runs: dict[int, Run]) -> Value:
    """The sum: over the dimensions of x and, behind them, of the taps."""
    shape: Shape = (*x.shape, *(sympy.Integer(run.taps) for run in runs.values()))
    read: dict[sympy.Symbol, Index] = {}
    mask: Term | None = None
    for number, (dim, run) in enumerate(runs.items()):
        here = axis_symbol(dim)
        read[run.axis] = at = run.begin(here, axis_symbol(x.rank + number))
        if not run.even:
            test = Term(as_expr(at)) < Term(as_expr(run.begin(here + 1)))
            mask = both(mask, test)
    for dim, index in enumerate(place):
        if dim not in runs:
            assert isinstance(index, sympy.Symbol)
            read[index] = axis_symbol(dim)
    wide = widen(source)
    term = placed(wide, shape, [read[axis_symbol(k)] for k in range(source.rank)], mask)
    values = Value(shape, wide.dtype, x.device, term.expr)
    total = fold(ctx, "sum", [values], list(range(x.rank, len(shape))))
    joined = combine(lambda old, new: old + new, convert(x, widened(x.dtype)), convert(total, widened(x.dtype)))
    return rounded(joined, x.dtype)


def _run(ctx: Builder, index: Expr, size: sympy.Expr, own: dict[sympy.Symbol, sympy.Expr]) -> Run | None:
    """The runs of one dimension with so many elements, from the place of each source."""
    known = _resolved(ctx, index, own)
    symbols = free_axes(known)
    if not size.is_Integer or len(symbols) != 1 or not symbols <= own.keys() or not _is_exact(known):
        return None
    (axis,) = symbols
    count = own[axis]
    if not count.is_Integer or not 0 < count <= LONGEST or not 0 < size <= LONGEST:
        return None
    (found,) = evaluate([known], {axis: range(int(count))}, Scope({}, {}, {}))
    places = found.expand(int(count)) if found.ndim else found.expand(1)
    if places[0] < 0 or places[-1] >= size or (places.diff() < 0).any():
        return None
    return _form(axis, places, int(size))


def _form(axis: sympy.Symbol, places: torch.Tensor, size: int) -> Run | None:
    """The runs of places that ascend."""
    count = len(places)
    begins = torch.searchsorted(places, torch.arange(size + 1))
    lengths = begins.diff()
    even = bool((lengths == lengths[0]).all())
    for ends in (0, 1):  # with both ends, then without
        inside = torch.arange(ends, size + 1 - ends)
        least = begins[inside] * size - inside * count
        low, high = (int(least.max()), int(least.min()) + size - 1) if len(inside) else (0, 0)
        if low <= high:
            return Run(axis, count, size, low, int(lengths.max()), even, bool(ends))
    return None


def _resolved(ctx: Builder, index: Expr, own: dict[sympy.Symbol, sympy.Expr]) -> Expr:
    """`index` with what maps computed before put in the place of its loads."""
    made = {node.out: node for node in ctx.nodes if isinstance(node, Map)}

    def rule(expr: Expr) -> Expr | None:
        if not isinstance(expr, Load) or expr.mask is not None or expr.buffer not in made:
            return None
        node = made[expr.buffer]
        at = {axis.symbol: place for axis, place in zip(node.axes, expr.index, strict=True)}
        return substitute(node.expr, at, own)

    while True:
        (further,) = rewrite([index], rule)
        if further is index:
            return index
        index = further


def _is_exact(expr: Expr) -> bool:
    """Does every target find the same number?  Quotients may differ, and sums of products, which may round once."""
    for part in postorder(expr):
        if isinstance(part, Op) and any(arg.dtype.is_floating_point for arg in part.args):
            sums = part.name in ("add", "sub") and not any(
                isinstance(arg, Op) and arg.name == "mul" for arg in part.args
            )
            if not sums and part.name not in PLAIN:
                return False
        elif not isinstance(part, (Op, Cast, Const, IndexValue)):
            return False
    return True


__all__ = ["summed_in_runs"]
