"""Determines the axes along which the loads and stores of a node are contiguous."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import sympy

from fusion.lowering.indexing import RUN, coefficient, flatten, stride_along
from fusion.lowering.ir.expr import Expr, Index, Load, loads, postorder
from fusion.lowering.ir.program import Axis, Map, Program, Reduce, Scan, axis_sizes
from fusion.lowering.ir.sizes import estimate

LEAST_COLUMNS = 32
"""The smallest number of columns per program if the reduced axis is not the contiguous one."""
VECTOR = 8
"""Elements of the widest vector of 16-bit numbers that a thread loads at once."""
HELD_WITH_NEIGHBOURS = 1 << 10
"""Elements of a row that fit into the registers of a program with the neighbouring rows that share its sectors."""

LANES = 32
"""Lanes of a warp, whose elements are requested together."""

SCATTERED = 1 << 20
"""Bytes of the smallest tensor of which a memory request for each element counts: a cache holds smaller ones."""


def reads_contiguously(program: Program, node: Reduce | Scan, looped: Sequence[Axis]) -> bool:
    """Return whether the largest operands are contiguous along one of the `looped` axes, and none along another one.

    If both occur, a program computes several rows, so that it reads neighbours of both: rows that it cannot hold
    meanwhile should be split.
    """
    along = contiguous_axes(program, node, looped)
    is_held = math.prod(estimate(axis.size, {}) for axis in looped) <= HELD_WITH_NEIGHBOURS
    across = any(estimate(axis.size, {}) >= LEAST_COLUMNS for axis in along.difference(looped))
    return not along.isdisjoint(looped) and (is_held or not across)


def contiguous_axes(program: Program, node: Reduce | Scan, looped: Sequence[Axis]) -> set[Axis]:
    """Return the axes along which the largest operands are contiguous."""
    sizes = axis_sizes(node)
    all_loads = [part for part in postorder(*node.args) if isinstance(part, Load)]
    elements = [
        estimate(program.buffers[load.buffer].numel, {}) for load in all_loads
    ]  # a slice counts as its whole buffer
    along = set[Axis]()
    for load, count in zip(all_loads, elements, strict=True):
        offset = flatten(load.index, program.buffers[load.buffer].strides, sizes)
        if count == max(elements):
            along.update(axis for axis in (*node.axes, *looped) if stride_along(offset, axis.symbol) in (1, -1))
    return along


def reads_across(program: Program, node: Map) -> int:
    """Return how many loads of a map are contiguous along another axis than its results."""
    sizes, buffers = axis_sizes(node), program.buffers
    written = _contiguous(flatten([axis.symbol for axis in node.axes], buffers[node.out].strides, sizes), sizes)
    offsets = (flatten(load.index, buffers[load.buffer].strides, sizes) for load in loads(node.expr))
    across = [offset for offset in offsets if not isinstance(offset, Expr) and offset.free_symbols & written]
    return sum(bool(axes) and axes.isdisjoint(written) for axes in (_contiguous(offset, sizes) for offset in across))


def window_loads(program: Program, node: Map) -> tuple[int, int, int]:
    """Return how many loads of a map belong to windows: several of one tensor, at fixed distances.

    They are counted separately: loads of whole vectors; loads that begin inside a vector; and loads with gaps between
    the elements of neighbouring lanes.
    """
    sizes, buffers = axis_sizes(node), program.buffers
    windows: dict[tuple[str, sympy.Expr], set[sympy.Expr]] = {}
    for load in loads(node.expr):
        offset = flatten(load.index, buffers[load.buffer].strides, sizes)
        if not isinstance(offset, Expr):
            distance, moving = offset.as_independent(*sizes, as_Add=True)
            windows.setdefault((load.buffer, moving), set()).add(distance)
    lanes = _contiguous(flatten([axis.symbol for axis in node.axes], buffers[node.out].strides, sizes), sizes)
    whole = shifted = strided = 0
    for (_, moving), distances in windows.items():
        if len(distances) == 1:
            continue
        steps = {coefficient(moving, axis) for axis in lanes} - {0}
        if not steps or (steps == {1} and all(distance % VECTOR == 0 for distance in distances)):
            whole += len(distances)
        elif steps == {1}:
            shifted += len(distances)
        else:
            strided += len(distances)
    return whole, shifted, strided


def is_scattered(
    offset: Index, sizes: Mapping[sympy.Symbol, sympy.Expr], hints: Mapping[sympy.Symbol, int] | None = None
) -> bool:
    """Return whether neighbours along no axis are neighbours in memory, at known positions.

    Args:
        sizes: the axes and their sizes; other symbols of `offset` are sizes of tensors.
        hints: the values of sizes of tensors, as far as they are known.

    >>> from fusion.lowering.indexing import FloorDiv, Mod, axis_symbol
    >>> i, k = axis_symbol(0), axis_symbol(1)
    >>> sizes = {i: sympy.Integer(1024), k: sympy.Integer(9216)}
    >>> turned = 9216 * i + 256 * Mod(k, 36) + FloorDiv(k, 36)
    >>> is_scattered(turned, sizes), is_scattered(9216 * i + k, sizes), is_scattered(i + 1024 * k, sizes)
    (True, False, False)
    >>> s = sympy.Symbol("s", integer=True, positive=True)
    >>> sizes = {i: sympy.Integer(1024), k: 256 * s}
    >>> turned = 256 * s * i + 256 * Mod(k, s) + FloorDiv(k, s)
    >>> is_scattered(turned, sizes, {s: 36}), is_scattered(turned, sizes, {s: 1})
    (True, False)
    """
    if isinstance(offset, Expr):
        return False
    spanned = [axis for axis in sizes if axis in offset.free_symbols and sizes[axis] != 1]
    return bool(spanned) and not any(_has_near_neighbours(offset, axis, sizes, hints or {}) for axis in spanned)


def requests_per_element(
    offset: sympy.Expr,
    sizes: Mapping[sympy.Symbol, sympy.Expr],
    columns: Collection[sympy.Symbol],
    width: int,
    hints: Mapping[sympy.Symbol, int] | None = None,
) -> float:
    """Return how many sectors an element of a scattered operand takes among those of neighbouring lanes, at most 1.

    Args:
        sizes: the axes of the product's tiles and their sizes, those that are folded last.
        columns: the axes along the tile's columns: the lanes of a warp follow each other along the last of them that
            `offset` depends on, and along the last axis of all where it depends on none.
        width: the elements of a sector.
        hints: the values of sizes of tensors, as far as they are known.

    >>> from fusion.lowering.indexing import FloorDiv, Mod, axis_symbol
    >>> i, k = axis_symbol(0), axis_symbol(1)
    >>> window = 58 * 3 * FloorDiv(k, 9) + Mod(k, 9) + 3 * i
    >>> sizes = {i: sympy.Integer(9), k: sympy.Integer(27)}
    >>> round(27 * requests_per_element(window, sizes, (), 16))
    5
    >>> requests_per_element(64 * i + k, sizes, {i}, 16)
    1.0
    """
    spanned = [axis for axis in sizes if axis in offset.free_symbols]
    lanes = next((axis for axis in reversed(spanned) if axis in columns), spanned[-1])
    places = _first_places(offset, lanes, LANES, sizes, hints or {})
    return len({place // width for place in places}) / len(places)


def _has_near_neighbours(
    offset: sympy.Expr,
    axis: sympy.Symbol,
    sizes: Mapping[sympy.Symbol, sympy.Expr],
    hints: Mapping[sympy.Symbol, int],
) -> bool:
    """Return whether the first points along an axis are adjacent in memory."""
    if (stride := coefficient(offset, axis)) is not None:
        return abs(estimate(stride, hints)) * (min(RUN, estimate(sizes[axis], hints)) - 1) < 2 * RUN
    places = _first_places(offset, axis, RUN, sizes, hints)
    return max(places) - min(places) < 2 * RUN


def _first_places(
    offset: sympy.Expr,
    axis: sympy.Symbol,
    count: int,
    sizes: Mapping[sympy.Symbol, sympy.Expr],
    hints: Mapping[sympy.Symbol, int],
) -> list[int]:
    """Return the elements that the first `count` points along an axis load, at the beginning of all others."""
    others = {other: sympy.Integer(0) for other in sizes if other is not axis}
    length = max(1, min(count, estimate(sizes[axis], hints)))
    return [estimate(offset.xreplace({**others, axis: sympy.Integer(k)}), hints) for k in range(length)]


def _contiguous(offset: Index, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> set[sympy.Symbol]:
    """Return the axes along which an offset moves by one element; none where it depends on data."""
    return set() if isinstance(offset, Expr) else {axis for axis in sizes if coefficient(offset, axis) == 1}
