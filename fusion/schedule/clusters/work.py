"""Counts the arithmetic of a node: additions per point, whatever cluster it is in.

Input: a node and the rates of a device; output: the additions that take as long as one point of the node.  Operations
cost as in the device's table; folds of rows, windows, reads across rows, scans and scatters cost what lanes do not
share (`Steps`).
"""

from __future__ import annotations

import math

import sympy
from typing_extensions import assert_never

from fusion.codegen.price import Rates, Steps
from fusion.lowering.chunks import Chunked
from fusion.lowering.expr import Expr, Op, free_axes, index_of, loads, postorder
from fusion.lowering.program import Compute, Contract, Extern, Map, Node, Program, Reduce, Scan, Scatter, axis_sizes
from fusion.lowering.sizes import estimate
from fusion.schedule.iteration.contiguity import reads_across, reads_contiguously, window_loads

WINDOW = 64
"""Elements of a fold from which on its lanes run along it, and are combined in the end."""

LOGARITHMIC = 40
"""Elements of another scan that take as long as one of logarithms: an exponential and a logarithm, lane by lane."""


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
            length = math.prod(estimate(axis.size, {}) for axis in node.over)
            row = length >= WINDOW and reads_contiguously(program, node, node.over)
            return rates.steps.fold / length if row else 0.0
        case Map():
            looked_up = rates.steps.turned * reads_across(program, node) + rates.steps.gathered * _gathers(node)
            return looked_up + _windowed(program, node, rates.steps)
        case Scan():
            return rates.steps.scanned * (LOGARITHMIC if node.op == "logsumexp" else 1)
        case Scatter():
            return rates.steps.updated
        case Contract():
            return 0.0
        case _:
            assert_never(node)


def _windowed(program: Program, node: Map, steps: Steps) -> float:
    """Return the additions of the loads of a map that belong to windows."""
    if not steps.windowed:
        return 0.0
    whole, shifted, strided = window_loads(program, node)
    return steps.windowed * (whole + steps.shifted * shifted + steps.strided * strided)


def is_padded_window(node: Node) -> bool:
    """Return whether a node folds short windows, and chooses for each of their elements whether it counts."""
    if not isinstance(node, Reduce) or math.prod(estimate(axis.size, {}) for axis in node.over) >= WINDOW:
        return False
    return any(isinstance(part, Op) and part.name == "where" for part in postorder(*node.exprs))


def _gathers(node: Map) -> int:
    """Return how many loads of a map have positions that depend on data along its last axis."""
    last = node.axes[-1].symbol if node.axes else None
    looked_up = (index for load in loads(node.expr) for index in load.index if isinstance(index, Expr))
    return sum(last in free_axes(index) for index in looked_up)
