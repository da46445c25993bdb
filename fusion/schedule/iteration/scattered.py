"""Decides which kernels a scatter may be part of.

Its memory is filled before the kernel, and read after it.  On a target that takes sources in their order, those that
may meet are walked by one program; elsewhere they are spread over programs, as the points of a map are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusion.lowering.program import Compute, Scatter
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Placement, Space


def space_of(node: Scatter, *, ordered: bool) -> Space:
    """The axes of a scatter, those that are walked apart from those that are spread over programs."""
    if not ordered:
        return Space(node.axes, ())
    met = node.colliding
    return Space(tuple(axis for axis in node.axes if axis not in met), met)


def not_apart(dependences: Dependences, members: Sequence[int], sides: Sequence[Space]) -> str | None:
    """Why the scatters among `members` cannot run while the others do; None if there are none, or they can."""
    nodes = [dependences.compute(m) for m in members]
    scattered = [node for node in nodes if isinstance(node, Scatter)]
    if not scattered:
        return None
    made = {node.out: node for node in nodes}
    read = set[str]().union(*(dependences.read[m] for m in members))
    if any(node.start in made and not _updates_further(node, made[node.start]) for node in scattered):
        return "a scatter begins when all that it is added to is there"
    if any(node.out in read for node in scattered):
        return "what is scattered is known when all sources have found their places"
    if any(side.streamed or side.rigid for side in sides):
        return "a scatter shares its kernel with no contraction"
    return None


def _updates_further(node: Scatter, first: Compute) -> bool:
    """May both scatters take place at once, the second in what the first one has made?  Folds come in any order."""
    return isinstance(first, Scatter) and first.op == node.op != "store"


def out_of_order(dependences: Dependences, places: Mapping[int, Placement], space: Space) -> str | None:
    """Why sources that may meet would not be walked by one program, or others by more than one; None if they are."""
    reduced = {axis.symbol for axis in space.reduced}
    for member, placement in places.items():
        node = dependences.node(member)
        if not isinstance(node, Scatter):
            continue
        for axis in node.axes:
            symbols = placement[axis.symbol].free_symbols
            if symbols - reduced if axis in node.colliding else symbols & reduced:
                return "sources that may meet would not be taken in their order"
    return None


__all__ = ["not_apart", "out_of_order", "space_of"]
