"""Chooses the axis that the SIMD lanes run along.

Lanes want memory that is contiguous along them.  Three cases follow from the strides of a kernel's accesses:

- the accesses inside the reduced axes are contiguous along a reduced axis (a row): every grid point is a program, and
  lanes run along that axis inside each sweep;
- they are contiguous along a grid axis (a column): that axis is split into blocks, and each block is a program whose
  lanes are its points; sums of columns become arrays of accumulators.  The same holds if they are contiguous along an
  axis of two to four points that the grid axis continues (groups of channels in the last dimension): vectors are full;
- nothing is reduced: lanes run along the grid axis along which most accesses, stores before loads, are contiguous.  If
  some loads are contiguous along another one (a transpose), both are split into 16 × 16 tiles, so that both sides use
  whole cache lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from fusion.codegen.c.plan.loop_fusion import Sweep
from fusion.lowering.indexing import ZERO, coefficient
from fusion.lowering.ir.expr import Expr, Index, IndexValue, Load, Op, free_axes, postorder
from fusion.lowering.ir.kernel import Kernel, KernelAxis, Role, Spans

TILE = 16
LANE_BLOCK = 1024
"""The most lanes of a block with accumulators: 4 KiB of each row, a page, which the prefetcher follows.

(measured: docs/performance.md, `LANE_BLOCK`)
"""

SHORT_BLOCK, SHORT_FOLD = 256, 64
"""The most lanes of a block for folds of at most `SHORT_FOLD` elements, such as windows.

Lanes read the same elements repeatedly.  (measured: docs/performance.md, `SHORT_BLOCK`)
"""

ACCUMULATORS = 1 << 14
"""The most bytes of a block's accumulators: they stay in L1, and on the stack of a thread."""

SUM = 12
"""Bytes of the accumulators of one lane: in float64, and of a part in float32."""

STREAM = 4096
"""Points of a block of element-wise work: large enough for prefetching, small enough to distribute."""

FEW_POINTS = 16
"""The longest reduced axis that is too short to fill lanes."""

HALF_A_VECTOR = 8
"""The shortest axis that fills lanes better than one of `FEWER_POINTS`."""

FEWER_POINTS = 4
"""The longest axis that leaves most lanes idle, and by whose points vectors can be sorted."""

CONFLICTING = 128
"""Elements between rows that share few sets of the L1 cache: a block of them does not stay there.

(measured: docs/performance.md, `CONFLICTING`)
"""

FOOTPRINT = 1 << 18
"""Bytes of a block that several sweeps read: it should stay in the L2 cache."""

MANY_PROGRAMS = 64
"""A number of programs that gives every thread some."""

FEW_PROGRAMS = 8
"""A number of programs that gives each of a few threads some: a sum of columns has as many parts for more threads
(measured: docs/performance.md, `FEW_PROGRAMS`)."""

NARROWEST_BLOCK = 64
"""The least width of a block: shorter rows would be too short for the prefetcher."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The placement of the lanes.

    Attributes:
        axis: the grid axis whose points are lanes; None: they run inside the sweeps.
        block: the number of points per block of that axis; None: the whole axis is one block.
        varies: `block` is an upper bound; the width is computed at launch, so that every thread has work.
        tile: the grid axis that forms 16 × 16 tiles with `axis`.
        streams: element-wise work along one axis: threads divide the lane loop itself.
        inner: the very short axis that `axis` continues in memory: its loop is inside the loop of the lanes.
    """

    axis: KernelAxis | None = None
    block: int | None = None
    varies: bool = False
    tile: KernelAxis | None = None
    streams: bool = False
    inner: KernelAxis | None = None


@dataclass(frozen=True, slots=True)
class LaneAccess:
    """One load or store, by its offset.

    `apart`: axes whose terms of the offset depend on no other axis.
    """

    offset: Index
    axes: frozenset[sympy.Symbol]
    weight: int
    apart: frozenset[sympy.Symbol] = frozenset()

    def stride(self, axis: KernelAxis) -> sympy.Expr | None:
        """Return the stride along `axis` in elements; None if it varies."""
        return _step(self.offset, axis.symbol) if axis.symbol in self.axes else ZERO


def _step(offset: Index, axis: sympy.Symbol) -> sympy.Expr | None:
    """Return the stride of an offset; columns of a data-dependent row are contiguous."""
    if not isinstance(offset, Expr):
        return coefficient(offset, axis)
    if axis not in free_axes(offset):
        return ZERO
    if isinstance(offset, IndexValue):
        return coefficient(offset.index, axis)
    if isinstance(offset, Op) and offset.name == "add":
        steps = [_step(part, axis) for part in offset.args]
        known = [step for step in steps if step is not None]
        return sympy.Add(*known) if len(known) == len(steps) else None
    return None


def accesses(sweeps: Iterable[Sweep], where: Spans) -> list[LaneAccess]:
    """Return every load and store of `sweeps`; stores weigh double, since a partly written cache line is also read."""
    result: list[LaneAccess] = []
    for sweep in sweeps:
        for node in postorder(*sweep.roots):
            if isinstance(node, Load):
                offset = node.index[0]
                span = where[offset] if isinstance(offset, Expr) else frozenset(offset.free_symbols)
                result.append(LaneAccess(offset, span, 1, _apart(node, where) if node.mask is None else frozenset()))
        for store in sweep.stores:
            offset = store.offset
            span = where[offset] if isinstance(offset, Expr) else frozenset(offset.free_symbols)
            result.append(LaneAccess(offset, span, 2))
    return result


def terms_of(position: Index) -> list[Expr]:
    """Return the terms of a sum of positions."""
    if isinstance(position, sympy.Expr):
        return [IndexValue(term) for term in sympy.Add.make_args(sympy.expand_mul(position))]
    if isinstance(position, IndexValue) and position.dtype is torch.int64:
        return terms_of(position.index)
    if isinstance(position, Op) and position.name == "add" and position.dtype is torch.int64:
        return [term for part in position.args for term in terms_of(part)]
    return [position]


def _apart(load: Load, where: Spans) -> frozenset[sympy.Symbol]:
    """Return the axes that no term of a position has together with another one."""
    spans = [
        frozenset(term.index.free_symbols) if isinstance(term, IndexValue) else where[term]
        for term in terms_of(load.index[0])
    ]
    return frozenset().union(*spans).difference(*(span for span in spans if len(span) > 1))


def _score(axis: KernelAxis, used: Sequence[LaneAccess]) -> int:
    """Return the weight of the contiguous accesses along an axis minus the weight of the others, except for gathers."""
    total = 0
    for access in used:
        stride = access.stride(axis)
        gathered = stride is None and axis.symbol in access.apart
        total += 0 if stride == 0 or gathered else access.weight if stride == 1 else -access.weight
    return total


def best_axis(axes: Sequence[KernelAxis], used: Sequence[LaneAccess]) -> KernelAxis:
    """Return the axis along which most accesses are contiguous; the last of equals."""
    return max(reversed(axes), key=lambda axis: _score(axis, used))


def choose_lanes(kernel: Kernel, sweeps: Sequence[Sweep], where: Spans, *, shared: bool) -> Lanes:
    """Choose the lanes for a whole kernel; `shared`: threads may share the grid."""
    grid = kernel.with_role(Role.GRID)
    inner = [axis for axis in kernel.axes if axis.role is not Role.GRID and any(axis in s.axes for s in sweeps)]
    used = accesses(sweeps, where)
    if not grid:
        return Lanes()
    if not inner:
        return _pointwise(grid, used)
    symbols = {axis.symbol for axis in inner}
    varying = [access for access in used if access.axes & symbols]
    outside, inside = best_axis(grid, varying), best_axis(inner, varying)
    length = sympy.Mul(*(axis.size for axis in inner))
    fewer = outside.size.is_Integer and inside.size.is_Integer and int(outside.size) < min(FEW_POINTS, int(inside.size))
    gain = _score(outside, varying) - _score(inside, varying)
    # a window is contiguous along both, and its own axis fills no register
    short = not fewer and (_is_short(inside.size) if gain >= 0 else _is_too_short(length, outside, varying))
    points = sympy.Mul(*(axis.size for axis in grid))
    along = continued(inside, grid, varying)
    if along is not None and length != inside.size:
        return replace(_blocks(along, _block(sweeps, length), points, shared=shared), inner=inside)
    if not short and gain <= 0:
        return Lanes()
    outside = continued(outside, grid, varying) or outside
    return _blocks(outside, _block(sweeps, length), points, shared=shared)


def _is_short(size: sympy.Expr) -> bool:
    return size.is_Integer and bool(size <= FEW_POINTS)


def _is_too_short(size: sympy.Expr, outside: KernelAxis, used: Iterable[LaneAccess]) -> bool:
    """Return whether a contiguous axis of this size fills lanes worse than an axis that gathers: `outside`.

    Half a vector is enough.  Fewer or odd numbers are not, unless the gathered rows are so far apart that they displace
    each other in the cache.
    """
    if not _is_short(size) or (size >= HALF_A_VECTOR and size % FEWER_POINTS == 0):
        return False
    return not any(
        stride is not None and stride and stride % CONFLICTING == 0 for stride in (a.stride(outside) for a in used)
    )


def continued(inner: KernelAxis, grid: Sequence[KernelAxis], used: Sequence[LaneAccess]) -> KernelAxis | None:
    """Return the axis of `grid` that continues a very short `inner` in all memory that is contiguous along that."""
    if not inner.size.is_Integer or not 1 < inner.size <= FEWER_POINTS:
        return None
    along = [access for access in used if access.stride(inner) == 1]
    fitting = (axis for axis in grid if all(access.stride(axis) == inner.size for access in along))
    return next((axis for axis in fitting if along and (not axis.size.is_Integer or axis.size >= HALF_A_VECTOR)), None)


def _block(sweeps: Sequence[Sweep], length: sympy.Expr) -> int:
    """Return the width of a block with accumulators."""
    width = SHORT_BLOCK if length.is_Integer and length <= SHORT_FOLD else LANE_BLOCK
    folds = max((len(sweep.folds) for sweep in sweeps), default=0)
    while width > NARROWEST_BLOCK and width * folds * SUM > ACCUMULATORS:
        width //= 2
    if sum(bool(sweep.axes) for sweep in sweeps) > 1:
        rows = int(length) if length.is_Integer else STREAM
        while width > NARROWEST_BLOCK and width * rows * 8 > FOOTPRINT:
            width //= 2
    return width


def _blocks(axis: KernelAxis, width: int, points: sympy.Expr, *, shared: bool) -> Lanes:
    """Split `axis` into blocks of `width`, or narrower ones if threads would have no work.

    An axis that is no longer than the narrowest block stays whole where others have programs: loops of known length
    keep their accumulators in registers, while each row waits for the stores of the row before in blocks that vary.
    """
    varies = shared and not (points.is_Integer and points >= MANY_PROGRAMS * width)
    if axis.size.is_Integer and axis.size <= width:
        whole = axis.size <= NARROWEST_BLOCK and points.is_Integer and points >= FEW_PROGRAMS * axis.size
        if not varies or axis.size <= TILE or whole:
            return Lanes(axis)
        width = -(-int(axis.size) // TILE) * TILE
    return Lanes(axis, width, varies)


def _pointwise(grid: Sequence[KernelAxis], used: Sequence[LaneAccess]) -> Lanes:
    axis = best_axis(grid, used)
    others = [other for other in grid if other is not axis]
    if _fills_tile(axis):
        across = [a for a in used if a.stride(axis) not in (0, 1)]
        crossing = [(sum(a.stride(other) == 1 for a in across), other) for other in others if _fills_tile(other)]
        count, tile = max(crossing, key=lambda pair: pair[0], default=(0, axis))
        if count:
            return Lanes(axis, TILE, tile=tile)
    if not others:
        return Lanes(axis, streams=True)
    points = sympy.Mul(*(other.size for other in others))
    whole = (points.is_Integer and points >= MANY_PROGRAMS) or (axis.size.is_Integer and axis.size <= STREAM)
    return Lanes(axis, None if whole else STREAM)


def in_blocks(kernel: Kernel, lanes: Lanes, width: int, *, shared: bool) -> Lanes:
    """Return lanes along a grid axis in blocks of at most `width`."""
    assert lanes.axis is not None
    points = sympy.Mul(*(axis.size for axis in kernel.with_role(Role.GRID)))
    return _blocks(lanes.axis, width, points, shared=shared)


def _fills_tile(axis: KernelAxis) -> bool:
    return not axis.size.is_Integer or int(axis.size) >= TILE


def loop_order(sweep: Sweep, lanes: Lanes, where: Spans) -> tuple[tuple[KernelAxis, ...], KernelAxis | None]:
    """Return the scalar loops of a sweep, outermost first, and the axis of its lanes (innermost).

    Loops over kept axes are outside of those over folded axes, unless the lanes run along one.
    """
    symbols = {s for root in sweep.roots for s in where[root]}
    symbols |= {s for store in sweep.stores if isinstance(store.offset, sympy.Expr) for s in store.offset.free_symbols}
    symbols |= {symbol for store in sweep.stores for symbol in store.axes or ()}
    lane: KernelAxis | None = None
    if lanes.axis is not None and lanes.axis.symbol in symbols:
        lane = lanes.axis
    elif sweep.axes:
        lane = best_axis(sweep.axes, accesses([sweep], where))
    rest = [axis for axis in sweep.axes if axis is not lane]
    rest.sort(key=lambda axis: axis.symbol in sweep.over)  # stable: kept axes first
    return tuple(rest), lane
