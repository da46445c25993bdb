"""Decides which rows are prefetched into the cache while rows before them are computed.

Three kinds of rows, which the processor's own prefetching does not find:

- A program that reads its row in several sweeps waits for memory in the first and for arithmetic in the others: that
  prefetching follows the loop that runs and stops where it ends.  The second sweep over a row fetches the next one.
- Rows of a table whose numbers are data (embeddings): a program prefetches the rows that programs some way ahead
  will read.
- Rows of a table which later values are added to (its gradient).

Measured figures are in docs/performance.md, "Rows that are fetched ahead".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import sympy

from fusion.codegen.c.plan.loop_fusion import Sweep
from fusion.lowering.indexing import coefficient, stride_along
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Load, Op, free_axes, loads, postorder, rewrite
from fusion.lowering.ir.kernel import Kernel, KernelAxis, Role
from fusion.lowering.ir.scalar_ops import CHECKED

CACHE_LINE = 64
"""Bytes of a cache line."""

LONGEST_ROW = 1 << 17
"""The most bytes of a row whose successor is fetched: both stay in the L2 cache."""

SMALLEST_PREFETCHED = 1 << 20
"""The least bytes of a tensor whose rows are fetched ahead: a smaller one is in the L2 cache already."""

FAR, MOST_LINES = 32, 256
"""The most rows of a table, and the most cache lines, from the row that is read to the prefetched row."""

UPDATED_LINES = 64
"""The most cache lines from the row of a table that is updated to the prefetched row."""

LINES = 16
"""The most cache lines that are fetched of one row of a table: a kilobyte."""

PLAIN = frozenset(("add", "sub", "mul", CHECKED))
"""Operations of a position that cannot fail at any point."""


def prefetch(first: str, count: int | str, itemsize: int) -> str:
    """Return the statement that fetches `count` elements of `itemsize` bytes, from the address `first`, into L2.

    >>> prefetch("in0 + 8*i0", 32, 4)
    'for (int l = 0; l < 32; l += 16) __builtin_prefetch(in0 + 8*i0 + l, 0, 2);'
    """
    return f"for (int l = 0; l < {count}; l += {CACHE_LINE // itemsize}) __builtin_prefetch({first} + l, 0, 2);"


def rows_ahead(kernel: Kernel, sweep: Sweep, earlier: Sequence[Sweep], lane: KernelAxis) -> dict[Load, sympy.Expr]:
    """Return the loads of a sweep whose next row it fetches → the offset at which that row starts.

    Args:
        earlier: the sweeps of the kernel before this one.
        lane: the axis along a row.
    """
    grid = kernel.with_role(Role.GRID)
    if not earlier or not grid:
        return {}
    row, along = grid[-1].symbol, lane.symbol  # programs of one thread follow each other along the last axis
    others = {axis.symbol for axis in sweep.axes} - {along}
    counts = Counter(load for each in earlier for load in {*loads(*each.roots)})
    ahead = {}
    for load in loads(*sweep.roots):
        index = load.index[0]
        if counts[load] != 1 or load.mask is not None or isinstance(index, Expr) or others & index.free_symbols:
            continue
        step = coefficient(index, row)
        if step is None or coefficient(index, along) != 1 or not _is_large(kernel, load.buffer):
            continue
        if _are_apart(step, lane.size, load.dtype.itemsize):
            ahead[load] = index.subs({row: row + 1, along: 0})
    return ahead


@dataclass(frozen=True, slots=True)
class Gathered:
    """A row of a table that a later program or iteration reads.

    Attributes:
        buffer: the table.
        position: the offset of its first element.
        lines: the number of cache lines to fetch.
    """

    buffer: str
    position: Expr
    lines: int


def gathered_ahead(
    kernel: Kernel, sweep: Sweep, earlier: Sequence[Sweep], lane: KernelAxis, row: KernelAxis
) -> list[Gathered]:
    """Return the rows of tables that a sweep fetches for later programs, which follow each other along `row`.

    Args:
        earlier: the sweeps of the kernel before this one.
        lane: the axis along a row of a table.
    """
    known = {*loads(*(root for each in earlier for root in each.roots))}
    inner = {axis.symbol: axis.size for axis in sweep.axes if axis != lane}
    ahead = []
    for load in loads(*sweep.roots):
        index = load.index[0]
        if load in known or not isinstance(index, Expr) or not _is_large(kernel, load.buffer):
            continue
        if stride_along(index, lane.symbol) != 1 or not _follows(kernel, index, row.symbol):
            continue
        lines = _lines_of(lane.size, load.dtype.itemsize)
        rows = sympy.Mul(*(inner[axis] for axis in free_axes(index) & inner.keys()))
        distance = max(1, min(FAR // int(rows), MOST_LINES // (int(rows) * lines))) if rows.is_Integer else 1
        later = {row.symbol: sympy.Min(row.symbol + distance, row.size - 1), lane.symbol: sympy.Integer(0)}
        ahead.append(Gathered(load.buffer, _at(index, later), lines))
    return ahead


def scattered_ahead(
    kernel: Kernel, sweep: Sweep, lane: KernelAxis, row: KernelAxis, most: int | None
) -> list[Gathered]:
    """Return the rows of tables that later iterations of the loop over `row` update.

    Args:
        lane: the axis along a row of a table.
        most: the most points of it in one program, if that is known.
    """
    ahead = []
    for store in sweep.stores:
        offset = store.offset
        if store.op == "store" or not isinstance(offset, Expr) or not _is_large(kernel, store.param):
            continue
        if stride_along(offset, lane.symbol) != 1 or not _follows(kernel, offset, row.symbol):
            continue
        length = lane.size if most is None else sympy.Integer(most)
        lines = _lines_of(length, kernel.param(store.param).dtype.itemsize)
        distance = max(1, min(FAR, UPDATED_LINES // lines))
        later = {row.symbol: sympy.Min(row.symbol + distance, row.size - 1), lane.symbol: sympy.Integer(0)}
        ahead.append(Gathered(store.param, _at(offset, later), lines))
    return ahead


def _is_large(kernel: Kernel, buffer: str) -> bool:
    """Return whether a tensor may be larger than the L2 cache."""
    param = kernel.param(buffer)
    size = sympy.sympify(prod(param.shape) * param.dtype.itemsize)
    return not size.is_Integer or bool(size >= SMALLEST_PREFETCHED)


def _follows(kernel: Kernel, index: Expr, row: sympy.Symbol) -> bool:
    """Return whether a position can be computed for another point of `row`, from elements that are not written."""
    parts = list(postorder(index))
    if not all(
        isinstance(e, Load | Const | IndexValue | Cast) or (isinstance(e, Op) and e.name in PLAIN) for e in parts
    ):
        return False
    follows = False
    for part in parts:
        if isinstance(part, Load):
            place = part.index[0]
            if isinstance(place, Expr) or part.mask is not None or kernel.param(part.buffer).written:
                return False
            follows |= row in place.free_symbols
    return follows


def _at(index: Expr, point: Mapping[sympy.Symbol, sympy.Expr]) -> Expr:
    """Return the index at another point without its bounds check: a prefetch outside the table has no effect."""

    def moved(node: Expr) -> Expr | None:
        match node:
            case Load(index=(sympy.Expr() as place,)):
                return replace(node, index=(place.subs(point),))
            case IndexValue(place):
                return replace(node, index=place.subs(point))
            case Op(name, (place, *_)) if name == CHECKED:
                return place
            case Op("add", (term, IndexValue(place))) if place == 0:
                return term
        return None

    return rewrite([index], moved)[0]


def _lines_of(length: sympy.Expr, itemsize: int) -> int:
    """Return how many cache lines of a row are fetched; the hardware prefetches the rest of a row."""
    return min(LINES, -(-int(length) * itemsize // CACHE_LINE)) if length.is_Integer else LINES


def _are_apart(step: sympy.Expr, length: sympy.Expr, itemsize: int) -> bool:
    """Return whether rows that start `step` elements apart do not overlap, and two of them fit the cache."""
    fit = not length.is_Integer or bool(length * itemsize <= LONGEST_ROW)
    return fit and bool((step - length).is_nonnegative)
