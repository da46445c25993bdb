"""Decides which kernels a scatter may be part of.

Its memory is filled before the kernel, and read after it.  On a target with ordered execution, sources whose indices
may collide are processed by one program; elsewhere they are spread over programs like the points of a map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusion.lowering.ir.program import Compute, Scatter
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Placement, Space


def space_of(node: Scatter, *, ordered: bool) -> Space:
    """Return the space of a scatter: axes whose points may collide are reduced axes, others parallel."""
    if not ordered:
        return Space(node.axes, ())
    met = node.colliding
    return Space(tuple(axis for axis in node.axes if axis not in met), met)


def conflict(dependences: Dependences, members: Sequence[int], sides: Sequence[Space]) -> str | None:
    """Return why the scatters among `members` cannot run alongside the others; None if they can, or there are none."""
    nodes = [dependences.compute(m) for m in members]
    scattered = [node for node in nodes if isinstance(node, Scatter)]
    if not scattered:
        return None
    nodes_by_result = {node.out: node for node in nodes}
    read = set[str]().union(*(dependences.read[m] for m in members))
    if any(
        node.start in nodes_by_result and not _updates_further(node, nodes_by_result[node.start]) for node in scattered
    ):
        return "a scatter starts after the tensor that it updates is complete"
    if any(node.out in read for node in scattered):
        return "a scatter's result is complete only after all sources are written"
    if any(side.chained or side.rigid for side in sides):
        return "a scatter shares its kernel with no contraction"
    return None


def _updates_further(node: Scatter, first: Compute) -> bool:
    """Return whether the second scatter may update the result of the first at the same time: folds commute."""
    return isinstance(first, Scatter) and first.op == node.op != "store"


def out_of_order(dependences: Dependences, places: Mapping[int, Placement], space: Space) -> str | None:
    """Return why colliding sources would be spread over programs, or others would not; None if neither happens."""
    reduced = {axis.symbol for axis in space.reduced}
    for member, placement in places.items():
        node = dependences.node(member)
        if not isinstance(node, Scatter):
            continue
        for axis in node.axes:
            symbols = placement[axis.symbol].free_symbols
            if symbols - reduced if axis in node.colliding else symbols & reduced:
                return "sources that may collide would not be written in order"
    return None


__all__ = ["conflict", "out_of_order", "space_of"]
