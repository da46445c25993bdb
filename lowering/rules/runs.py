"""Lowers sums that are scattered to ascending positions: each element sums the run of sources that name it.

The gradient of nearest-neighbour resampling is such a sum: the target of a source is computed from its position alone.
If all positions are known, so are the targets; if the runs begin at an affine quotient of the target, each element
computes its own run, and no indices collide.  Input: a sum as `folded` takes it; None is returned where the targets are
loaded, do not ascend, or have no such form, and where devices might round them differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.indexing import ZERO, FloorDiv, axis_symbol, simplify, substitute
from fusion.lowering.indexing.substitution import as_expr
from fusion.lowering.interpret.evaluate import Scope, evaluate
from fusion.lowering.ir.expr import Cast, Const, Expr, Index, IndexValue, Load, Op, free_axes, postorder, rewrite
from fusion.lowering.ir.program import Map
from fusion.lowering.ir.scalar_ops import COMPARISONS
from fusion.lowering.rules.assembly import placed
from fusion.lowering.rules.formula import Term, both, where
from fusion.lowering.rules.promotion import combine, convert, rounded, widen, widened
from fusion.lowering.rules.reduction import fold
from fusion.lowering.value import Shape, Value, axis_bounds

LONGEST_RUN, MOST_TAPS = 1 << 16, 32
"""Sources along a dimension whose targets are evaluated, and the longest run of an element."""

EXACT_OPERATIONS = COMPARISONS | {"mul", "floor", "trunc", "minimum", "maximum", "where", "neg"}
"""Operations on floats with one result on every device, whatever the surrounding operations."""


@dataclass(frozen=True, slots=True)
class Run:
    """The sources along `axis` that name an element: from ⌊(n·place + shift) / size⌋ on, at most `taps`.

    `even`: each element has equally many.  The first run begins at 0, the last one ends at `count`.
    """

    axis: sympy.Symbol
    count: int
    size: int
    shift: int
    taps: int
    even: bool
    inner: bool  # the form does not hold at both ends

    def begin(self, place: sympy.Expr, further: sympy.Expr = ZERO) -> Index:
        """Return the first source of an element's run plus `further`; behind the last element, the end of its run."""
        quotient = FloorDiv(place * self.count + self.shift, sympy.Integer(self.size))
        at = simplify(quotient, {}) + further
        if not self.inner:
            return at
        here, end = Term(IndexValue(place)), Term(IndexValue(self.count + further))
        first = Term(IndexValue(further))
        return where(here <= 0, first, where(here >= self.size, end, Term(IndexValue(at)))).expr


def summed_in_runs(ctx: Builder, x: Value, place: Sequence[Index], source: Value) -> Value | None:
    """Return x with the sources added at their positions, or None where those do not form runs."""
    own = axis_bounds(source.shape)
    runs: dict[int, Run] = {}
    left = set(own)
    for dim, index in enumerate(place):
        if isinstance(index, sympy.Symbol) and index in left:
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
    """Return the sum over the dimensions of x and, behind them, of the taps."""
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
    updated = combine(lambda old, new: old + new, convert(x, widened(x.dtype)), convert(total, widened(x.dtype)))
    return rounded(updated, x.dtype)


def _run(ctx: Builder, index: Expr, size: sympy.Expr, own: dict[sympy.Symbol, sympy.Expr]) -> Run | None:
    """Return the runs along a dimension of this size, from the positions of the sources."""
    known = _resolved(ctx, index, own)
    symbols = free_axes(known)
    if not size.is_Integer or len(symbols) != 1 or not symbols <= own.keys() or not _is_exact(known):
        return None
    (axis,) = symbols
    count = own[axis]
    if not count.is_Integer or not 0 < count <= LONGEST_RUN or not 0 < size <= LONGEST_RUN:
        return None
    (evaluated,) = evaluate([known], {axis: range(int(count))}, Scope({}, {}, {}))
    places = evaluated.expand(int(count)) if evaluated.ndim else evaluated.expand(1)
    if places[0] < 0 or places[-1] >= int(size) or (places.diff() < 0).any():
        return None
    return _form(axis, places, int(size))


def _form(axis: sympy.Symbol, places: torch.Tensor, size: int) -> Run | None:
    """Return the runs of ascending positions, if they have the form of `Run`."""
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
    """Inline the maps that were computed before into the loads of `index`."""
    maps = {node.out: node for node in ctx.nodes if isinstance(node, Map)}

    def rule(expr: Expr) -> Expr | None:
        if not isinstance(expr, Load) or expr.mask is not None or expr.buffer not in maps:
            return None
        node = maps[expr.buffer]
        at = {axis.symbol: place for axis, place in zip(node.axes, expr.index, strict=True)}
        return substitute(node.expr, at, own)

    while True:
        (further,) = rewrite([index], rule)
        if further is index:
            return index
        index = further


def _is_exact(expr: Expr) -> bool:
    """Return whether every device computes `expr` to the same bits; not so for quotients and sums of products (FMA)."""
    for part in postorder(expr):
        if isinstance(part, Op) and any(arg.dtype.is_floating_point for arg in part.args):
            sums = part.name in ("add", "sub") and not any(
                isinstance(arg, Op) and arg.name == "mul" for arg in part.args
            )
            if not sums and part.name not in EXACT_OPERATIONS:
                return False
        elif not isinstance(part, (Op, Cast, Const, IndexValue)):
            return False
    return True


__all__ = ["summed_in_runs"]
