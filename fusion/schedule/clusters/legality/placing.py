"""Places one cluster in the space of another: each node's axes as functions of the other's axes.

Input: two clusters and the buffer that links them; output: a space with the placements of all members, or the reason
why there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import sympy

from fusion.lowering.ir.expr import Expr, Index
from fusion.schedule.clusters.legality.cluster import Cluster, Link
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Placement, Space, join, place


def directions(first: Cluster, second: Cluster, link: Link) -> Iterator[tuple[Cluster, Cluster, int, int]]:
    """Yield (target, moved, node of target, node of moved) to try, best first: the side with folds keeps its space."""
    forward = (second, first, link.second, link.first)
    backward = (first, second, link.first, link.second)
    if first.space.rigid:
        yield backward
    elif second.space.rigid:
        yield forward
    elif first.space.reduced and not second.space.reduced:
        yield backward
        yield forward
    else:
        yield forward
        yield backward


def placed_in(
    dependences: Dependences, target: Cluster, moved: Cluster, target_node: int, moved_node: int, buffer: str
) -> tuple[Space, dict[int, Placement]] | str:
    """Return the common space and all placements in it, or why `moved` has none in the space of `target`."""
    target_indices = list(_indices(dependences, target, target_node, buffer))
    moved_indices = list(_indices(dependences, moved, moved_node, buffer))
    if not target_indices or not moved_indices:
        return "the two sides have no common placed reader"
    target_index, moved_index = target_indices[0], moved_indices[0]
    same = next((index for index in target_indices if index in moved_indices), None)
    if same is not None:  # both read a window: any of its points will do
        target_index = moved_index = same
    extents = dependences.program.buffers[buffer].shape
    known = [
        (a, b, extent)
        for a, b, extent in zip(target_index, moved_index, extents, strict=True)
        if a is not None and b is not None  # a gathered dimension determines nothing
    ]
    joined = join(target.space, [k[0] for k in known], moved.space, [k[1] for k in known], [k[2] for k in known])
    if isinstance(joined, str):
        return joined
    sizes = joined.space.sizes
    places: dict[int, Placement] = dict(target.places)
    if joined.target:
        places = {m: moved_by(p, joined.target, sizes) for m, p in target.places.items()}
    places.update({m: moved_by(p, joined.moved, sizes) for m, p in moved.places.items()})
    return joined.space, places


def moved_by(placement: Placement, change: Placement, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> Placement:
    """Substitute moved axes in a placement."""
    if not change:
        return placement
    return {axis: place(expr, change, sizes) for axis, expr in placement.items()}


def _indices(
    dependences: Dependences, cluster: Cluster, position: int, buffer: str
) -> Iterator[tuple[sympy.Expr | None, ...]]:
    """Yield the indices at which a member accesses `buffer`, over the cluster's axes; None for a gathered dimension."""
    axes = _axes_at(dependences, cluster, position)
    if axes is None:
        return
    node = dependences.compute(position)
    if node.out == buffer:
        yield tuple(axes[axis.symbol] for axis in node.axes)
        return
    for load in dependences.loads[position]:
        if load.buffer == buffer:
            yield tuple(_at(i, axes, cluster.space.sizes) for i in load.index)


def _axes_at(
    dependences: Dependences, cluster: Cluster, position: int
) -> Mapping[sympy.Symbol, sympy.Expr | None] | None:
    """Return a member's axes in the space: its placement, or, without one, the index of its first reader."""
    placement = cluster.places.get(position)
    if placement is not None:
        return placement
    node = dependences.compute(position)
    for reader in dependences.readers.get(node.out, ()):
        if reader in cluster.members:
            index = next(_indices(dependences, cluster, reader, node.out), None)
            if index is not None:
                return {axis.symbol: i for axis, i in zip(node.axes, index, strict=True)}
    return None


def _at(
    index: Index, axes: Mapping[sympy.Symbol, sympy.Expr | None], sizes: Mapping[sympy.Symbol, sympy.Expr]
) -> sympy.Expr | None:
    """Return a load's index with the reader's axes replaced; None if it is gathered or depends on a gathered axis."""
    if isinstance(index, Expr):
        return None
    if isinstance(index, sympy.Symbol):
        return axes.get(index, index)
    known = {symbol: expr for symbol, expr in axes.items() if expr is not None}
    if len(known) != len(axes) and any(symbol in axes and axes[symbol] is None for symbol in index.free_symbols):
        return None
    return place(index, known, sizes)
