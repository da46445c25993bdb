"""Checks a joined cluster: folds stay undivided, are read where they are computed, and results are stored once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.indexing import invert, replace_axes, simplify, within
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Expr, Index, Load
from fusion.lowering.ir.program import Axis, Compute, Extern, Map, Reduce, Scan, Scatter
from fusion.lowering.value import contiguous_strides
from fusion.schedule.clusters.legality.cluster import Cluster
from fusion.schedule.iteration import contractions, scattered
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Placement, Space


def refusal_of(
    dependences: Dependences, capabilities: Capabilities, joined: Cluster, target: Cluster, moved: Cluster
) -> str | None:
    """Return the first rule that the joined cluster breaks, which holds `moved` in the space of `target`."""
    return (
        _folds_stay_whole(dependences, joined, moved)
        or (_folds_keep_their_order(dependences, joined, moved) if capabilities.invariant else None)
        or _folds_stay_inside(dependences, joined, moved)
        or (scattered.out_of_order(dependences, joined.places, joined.space) if capabilities.ordered else None)
        or _scans_stay_whole(dependences, joined)
        or _reads_agree(dependences, joined, (target, moved))
        or contractions.refused(dependences, joined.members, joined.space, joined.places)
        or _stores_once(dependences, joined)
    )


def _folds_stay_whole(dependences: Dependences, joined: Cluster, moved: Cluster) -> str | None:
    """Check that a fold runs over all reduced axes of the space, and its result varies along parallel axes only."""
    parallel = {axis.symbol for axis in joined.space.parallel}
    reduced = {axis.symbol for axis in joined.space.reduced}
    for member in moved.members:
        node = dependences.node(member)
        if not isinstance(node, Reduce):
            continue
        if member not in joined.places:
            return "a reduction cannot be read at another index than its own"
        placement = joined.places[member]
        if any(placement[axis.symbol].free_symbols & reduced for axis in node.axes):
            return "a reduction is read across the axis that the other side reduces"
        if any(placement[axis.symbol].free_symbols & parallel for axis in node.over):
            return "a reduction would run over an axis that the other side spreads over programs"
        length = sympy.Mul(*(axis.size for axis in node.over))
        if length != sympy.Mul(*(axis.size for axis in joined.space.reduced)):
            return "the reductions run over different lengths"
        if not _covers_each_point_once(node, placement, joined.space):
            return "a reduction would not read each of its points once"
    return None


def _covers_each_point_once(node: Reduce, placement: Placement, space: Space) -> bool:
    """Return whether the reduced axes of the joined space map one to one onto the reduction domain of the fold."""
    over = [axis for axis in node.over if axis.size != 1]
    places, axes = [placement[axis.symbol] for axis in over], [axis for axis in space.reduced if axis.size != 1]
    if len(set(places)) == len(places) and {*places} == {axis.symbol for axis in axes}:
        return True
    values = [sympy.Symbol(f"v{k}", integer=True, nonnegative=True) for k in range(len(over))]
    inverse = invert(places, values, [axis.size for axis in over], [axis.symbol for axis in axes], space.sizes)
    return inverse is not None and not inverse.free


def _folds_keep_their_order(dependences: Dependences, joined: Cluster, moved: Cluster) -> str | None:
    """Check that a fold visits its points in its own order under batch-invariant numerics, also beside others."""
    number, sizes = _row_major(joined.space.reduced), joined.space.sizes
    for member in moved.members:
        node = dependences.node(member)
        if isinstance(node, Reduce):
            own = {axis.symbol: joined.places[member][axis.symbol] for axis in node.over}
            if simplify(_row_major(node.over).xreplace(own), sizes) != simplify(number, sizes):
                return "a reduction would visit its points in another order"
    return None


def _row_major(axes: Sequence[Axis]) -> sympy.Expr:
    """Return the number of a point in row-major order."""
    strides = contiguous_strides(tuple(axis.size for axis in axes))
    return sympy.Add(*(axis.symbol * stride for axis, stride in zip(axes, strides, strict=True) if axis.size != 1))


def _folds_stay_inside(dependences: Dependences, joined: Cluster, moved: Cluster) -> str | None:
    """Check that a fold stays within its bounds, also for readers that mask out positions past the ends (padding)."""
    sizes = joined.space.sizes
    for member in moved.members:
        node = dependences.node(member)
        if isinstance(node, (Extern, Chunked, Map)) or member not in joined.places:
            continue
        placement = joined.places[member]
        for axis in (*node.axes, *node.over):
            if axis.symbol in placement and not within(placement[axis.symbol], axis.size, sizes):
                return "a reduction is read past its ends"
    return None


def _scans_stay_whole(dependences: Dependences, joined: Cluster) -> str | None:
    """Check that a scan runs along the only reduced axis of the space, from its first point to its last."""
    looped = [axis.symbol for axis in joined.space.reduced if axis.size != 1]
    for member in joined.members:
        node = dependences.node(member)
        if not isinstance(node, Scan):
            continue
        if member not in joined.places:
            return "a scan cannot be read at another index than its own"
        at = joined.places[member]
        if looped != [at[node.along]]:
            return "a scan would not run along its axis alone, from the first point to the last"
        if any(at[axis.symbol].free_symbols & {*looped} for axis in node.axes if axis.symbol != node.along):
            return "a scan is read across the axis that it runs along"
    return None


def _reads_agree(dependences: Dependences, joined: Cluster, sides: tuple[Cluster, Cluster]) -> str | None:
    """Check that a fold is read at the point where it was computed; other nodes may be recomputed at any index.

    Reads within one side that depend on its own folds alone are known to agree: joining moves both ends alike.
    """
    first = frozenset(sides[0].members)
    by_out = {dependences.compute(m).out: m for m in joined.members}
    folded: dict[int, set[bool]] = {}  # member → whether the folds it depends on are those of the first side
    for member in joined.members:
        node, side = dependences.compute(member), member in first
        sides_of_folds: set[bool] = set() if isinstance(node, Map) else {side}
        for load in dependences.loads[member]:
            producer = by_out.get(load.buffer)
            if producer is None or producer not in folded:
                continue
            sides_of_folds |= folded[producer]
            if (producer in first) == side and folded[producer] == {side} and producer in joined.places:
                continue
            if joined.space.rigid and not isinstance(node, Map):
                return "a fold would feed the contraction"
            placement = joined.places.get(member)  # a member without one is checked through its readers
            if placement is not None and not _agrees(dependences, joined, folded, load, placement):
                return "a reduced value is read at an index other than its own"
        if sides_of_folds:
            folded[member] = sides_of_folds
    return None


def _agrees(
    dependences: Dependences,
    cluster: Cluster,
    folded: Collection[int],
    load: Load,
    axes: Mapping[sympy.Symbol, Index],
) -> bool:
    """Return whether a load, in a reader placed at `axes`, reads every fold it depends on at the fold's own point.

    A map between the fold and the reader may be recomputed elsewhere (a gather from log-probabilities) as long as it
    reads the same fold.
    """
    sizes = cluster.space.sizes
    producer = dependences.writer[load.buffer]
    node = dependences.compute(producer)
    index: list[Index] = [i if isinstance(i, Expr) else replace_axes(i, axes, sizes) for i in load.index]
    there = cluster.places.get(producer)
    if there is not None:
        pairs = zip(node.axes, index, strict=True)
        if all(i is there[axis.symbol] or i == there[axis.symbol] or axis.size == 1 for axis, i in pairs):
            return True
    if not isinstance(node, Map):
        return False
    inner: dict[sympy.Symbol, Index] = {axis.symbol: i for axis, i in zip(node.axes, index, strict=True)}
    return all(
        _agrees(dependences, cluster, folded, part, inner)
        for part in dependences.loads[producer]
        if dependences.writer.get(part.buffer) in folded
    )


def _stores_once(dependences: Dependences, joined: Cluster) -> str | None:
    """Check that a stored result is computed at every point exactly once, outside the loop of the folds."""
    reduced = {axis.symbol for axis in joined.space.reduced if axis.size != 1}
    together = frozenset(joined.members)
    for member in joined.members:
        if not dependences.stored(member, together) and not isinstance(dependences.node(member), Scatter):
            continue
        if member not in joined.places:
            return "the tensor is needed elsewhere too, and is read here at other points than it is computed"
        missing = unspanned(dependences.compute(member), joined.places[member], joined.space)
        if missing is None:
            return "the tensor is needed elsewhere too, and its axes are not a rearrangement of the kernel's"
        missing -= joined.space.held
        crosses = bool(missing) and missing == joined.space.outer  # its points are those of the loop
        if not crosses and (not missing <= reduced or (missing and missing != reduced)):
            return "the tensor is needed elsewhere too, and has fewer points than the kernel's loop"
        if joined.space.rigid and not missing:
            return "an operand of a contraction is needed elsewhere too"
    return None


def unspanned(node: Compute, placement: Placement, space: Space) -> set[sympy.Symbol] | None:
    """Return the axes of `space` that a node does not span; None if its placement is not a bijection."""
    exprs = [placement[axis.symbol] for axis in node.axes]
    symbols = [expr for expr in exprs if isinstance(expr, sympy.Symbol)]
    sizes = space.sizes
    if len(set(symbols)) == len(symbols) and all(
        (isinstance(e, sympy.Symbol) and sizes.get(e) == axis.size) or (e == 0 and axis.size == 1)
        for e, axis in zip(exprs, node.axes, strict=True)
    ):
        return {axis.symbol for axis in space.axes if axis.size != 1} - set(symbols)
    values = tuple(sympy.Symbol(f"v{k}", integer=True, nonnegative=True) for k in range(len(exprs)))
    inverse = invert(exprs, values, [axis.size for axis in node.axes], [a.symbol for a in space.axes], sizes)
    return None if inverse is None else {s for s in inverse.free if sizes[s] != 1}
