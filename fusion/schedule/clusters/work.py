"""Counts the arithmetic of a node: additions per point, whatever cluster it is in.

Input: a node and the rates of a device; output: the additions that take as long as one point of the node.  Operations
cost as in the device's table; folds of rows, windows, reads across rows, scans and scatters have further costs, since
lanes do not share their work (`Steps`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import sympy
from typing_extensions import assert_never

from fusion.codegen.price import Rates, Steps
from fusion.lowering.indexing import coefficient, flatten
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Cast, Expr, IndexValue, Load, Op, free_axes, index_of, loads, postorder
from fusion.lowering.ir.program import Compute, Contract, Extern, Map, Node, Program, Reduce, Scan, Scatter, axis_sizes
from fusion.lowering.ir.scalar_ops import keeps_position
from fusion.lowering.ir.sizes import estimate
from fusion.schedule.iteration.contiguity import LANES, contiguous_axes, reads_across, reads_contiguously, window_loads

_LINE = 128
"""Bytes of a line of a GPU's nearest cache."""

WINDOW = 64
"""Elements of a fold from which on its lanes run along it, and are combined in the end."""


def additions_per_point(program: Program, node: Node, rates: Rates) -> float:
    """Return the additions that take as long as evaluating one point of a node."""
    if isinstance(node, (Extern, Chunked)):
        return 0.0
    return max(1.0, _evaluated(node, rates)) + _unshared(program, node, rates)


def additions_in_tiles(program: Program, node: Node, rates: Rates) -> float:
    """Return the same for a kernel of products, which evaluates every part for each element of its tiles."""
    if isinstance(node, (Extern, Chunked)):
        return 0.0
    return max(1.0, rates.cost(*node.exprs)) + _unshared(program, node, rates)


def _evaluated(node: Compute, rates: Rates) -> float:
    """Return the additions per point of a node's expressions; parts that fewer axes decide are evaluated less often."""
    sizes = {axis: estimate(size, {}) for axis, size in axis_sizes(node).items()}
    points = math.prod(sizes.values())
    axes: dict[Expr, frozenset[sympy.Basic]] = {}
    total = 0.0
    for part in postorder(*node.exprs):
        own = (index.free_symbols for index in index_of(part))
        axes[part] = frozenset[sympy.Basic]().union(*own, *(axes[child] for child in part.children()))
        cost = rates.cost_of(part)
        if cost:
            total += cost * math.prod(size for axis, size in sizes.items() if axis in axes[part]) / max(1, points)
    return total


def _unshared(program: Program, node: Compute, rates: Rates) -> float:
    """Return the additions of work that lanes do not share."""
    match node:
        case Reduce():
            return _folded(program, node, rates) + _looked_up(program, node, rates.steps)
        case Map():
            turned = rates.steps.turned * reads_across(program, node)
            return turned + _looked_up(program, node, rates.steps) + _windowed(program, node, rates.steps)
        case Scan():
            own = 1.0 if reads_contiguously(program, node, (node.scanned,)) else rates.steps.across
            return rates.steps.scanned * (rates.steps.logarithmic if node.op == "logsumexp" else own)
        case Scatter():
            return rates.steps.updated * (rates.steps.rows if updates_rows(node) else 1.0)
        case Contract():
            return 0.0
        case _:
            assert_never(node)


def updates_rows(node: Scatter) -> bool:
    """Return whether the elements that neighbouring sources update are neighbours: rows, which lanes share."""
    last = node.index[-1]
    return isinstance(last, IndexValue) and last.index in {axis.symbol for axis in node.axes if axis.size != 1}


def is_held(program: Program, node: Scatter, steps: Steps) -> bool:
    """Return whether all elements that a scatter may update stay in the nearest cache."""
    updated = program.buffers[node.out]
    return estimate(updated.numel, {}) * updated.dtype.itemsize <= steps.near


def _folded(program: Program, node: Reduce, rates: Rates) -> float:
    """Return the additions per element of a fold in addition to its operations."""
    steps, length = rates.steps, math.prod(estimate(axis.size, {}) for axis in node.over)
    total = steps.placed if keeps_position(node.op) else 0.0
    if steps.window and is_split_window(program, node):
        bounded = is_bounded(program, node)
        lanes = max(1, estimate(node.axes[-1].size, {})) if node.axes else 1
        total += steps.window * (1.0 if bounded else steps.unbounded) / lanes
    factors = factors_of(node) if steps.together else None
    if factors is not None:
        total += _multiplied(node, factors, rates)
    if length >= WINDOW and reads_contiguously(program, node, node.over):
        total += (steps.fold if factors is None else steps.together) / length
    return total


def factors_of(node: Reduce) -> tuple[Expr, Expr] | None:
    """Return the factors of a sum of products, without conversions, one of which spans fewer axes than the results."""
    (value, *_) = node.args
    if node.op != "sum" or not isinstance(value, Op) or value.name != "mul":
        return None
    axes = {axis.symbol for axis in node.axes if axis.size != 1}
    left, right = (_converted(arg) for arg in value.args)
    return None if all(axes <= free_axes(side) for side in (left, right)) else (left, right)


def _converted(value: Expr) -> Expr:
    """Return the operand of a conversion, or of nested ones; any other value as it is."""
    return _converted(value.arg) if isinstance(value, Cast) else value


def _multiplied(node: Reduce, factors: tuple[Expr, Expr], rates: Rates) -> float:
    """Return the additions of a term of a sum of products, beyond the addition that counts as its multiplication.

    It is computed at the rate of the library's products; the smaller factor is read again for each result.
    """
    widest = max(side.dtype.itemsize for side in factors)
    term = rates.flops * rates.product_us_of(2, widest)
    return term * (rates.steps.refetched if is_refetched(node, rates.steps) else 1.0) - 1


def is_refetched(node: Reduce, steps: Steps) -> bool:
    """Return whether the smaller factor of a sum of products leaves the nearest cache between two results."""
    sizes = {axis: estimate(size, {}) for axis, size in axis_sizes(node).items()}
    held = (
        side.dtype.itemsize * math.prod(size for axis, size in sizes.items() if axis in free_axes(side))
        for side in factors_of(node) or ()
    )
    return min(held, default=0) > steps.near


def _windowed(program: Program, node: Map, steps: Steps) -> float:
    """Return the additions of the loads of a map that belong to windows."""
    if not steps.windowed:
        return 0.0
    whole, shifted, strided = window_loads(program, node)
    return steps.windowed * (whole + steps.shifted * shifted + steps.strided * strided)


def is_split_window(program: Program, node: Node) -> bool:
    """Return whether a node folds short windows that lanes cannot read contiguously.

    Either a condition that differs between neighbours in memory decides for each element of a window whether it counts,
    or windows overlap, and the windows of neighbouring lanes start two or more elements apart.
    """
    if not isinstance(node, Reduce) or math.prod(estimate(axis.size, {}) for axis in node.over) >= WINDOW:
        return False
    return is_bounded(program, node) or any(_overlaps(program, node, load) for load in loads(*node.exprs))


def is_bounded(program: Program, node: Reduce) -> bool:
    """Return whether a condition that differs between neighbours in memory decides which elements of a window count.

    Conditions of data choose between values in each lane, whatever they are.
    """
    parts = list(postorder(*node.exprs))
    masks = [part.mask for part in parts if isinstance(part, Load) and part.mask is not None]
    chosen = [part.args[0] for part in parts if isinstance(part, Op) and part.name == "where"]
    along = {axis.symbol for axis in contiguous_axes(program, node, ())}
    conditions = (condition for condition in (*masks, *chosen) if not any(True for _ in loads(condition)))
    return any(not along or not along.isdisjoint(free_axes(condition)) for condition in conditions)


def _overlaps(program: Program, node: Reduce, load: Load) -> bool:
    """Return whether neighbouring results along the last axis read overlapping windows, not one element apart."""
    offset = flatten(load.index, program.buffers[load.buffer].strides, axis_sizes(node))
    if isinstance(offset, Expr) or not node.axes:
        return False
    step = coefficient(offset, node.axes[-1].symbol)
    if step is None or not step.is_Integer or step < 2:
        return False
    along = ((coefficient(offset, axis.symbol), axis.size) for axis in node.over)
    return any(each == 1 and bool(size.is_Integer and size > step) for each, size in along)


def _looked_up(program: Program, node: Map | Reduce, steps: Steps) -> float:
    """Return the additions of loads whose positions are data or computed: lane by lane, or for each row of a fold."""
    sizes = {axis: estimate(size, {}) for axis, size in axis_sizes(node).items()}
    total = 0.0
    for load in loads(*node.exprs):
        positions = [index for index in load.index if isinstance(index, Expr)]
        if not positions:
            continue
        own, last = frozenset[sympy.Basic]().union(*map(free_axes, positions)), load.index[-1]
        along = frozenset() if isinstance(last, Expr) else last.free_symbols - own
        is_data = any(True for _ in loads(*positions))
        if isinstance(node, Map):
            lanes, cost = node.axes[-1].symbol if node.axes else None, steps.gathered if is_data else steps.computed
            count = sum(lanes in free_axes(each) for each in positions)
            if lanes is not None and count:
                total += max(cost * count, steps.requested * _lines(program, load, lanes, sizes))
        elif not along:
            total += steps.gathered
        elif is_data:
            total += steps.looked_up / math.prod(max(1, size) for axis, size in sizes.items() if axis not in own)
    return total


def _lines(program: Program, load: Load, lanes: sympy.Symbol, sizes: Mapping[sympy.Symbol, int]) -> float:
    """Return how many lines of memory an element takes among those that neighbouring lanes load, at most 1.

    Along a dimension whose position is data or computed, elements are anywhere; along any other one, where the index
    says.
    """
    buffer, apart = program.buffers[load.buffer], 1 / LANES
    for index, stride, size in zip(load.index, buffer.strides, buffer.shape, strict=True):
        step = estimate(stride, {}) * buffer.dtype.itemsize
        if isinstance(index, Expr):
            reach = step * estimate(size, {}) if lanes in free_axes(index) else 0
        else:
            moved = coefficient(index, lanes)
            factor = int(moved) if moved is not None and moved.is_Integer else int(lanes in index.free_symbols)
            reach = step * abs(factor) * min(LANES, sizes[lanes])
        apart = max(apart, min(1.0, reach / (_LINE * LANES)))
    return apart
