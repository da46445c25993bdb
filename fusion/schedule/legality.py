"""Legality: may two clusters be one kernel?

One rule per function, each returning None or the reason of the refusal; `may_join` runs them in order.  Whether a path
leaves the pair and comes back is a property of the graph, not of the pair, and is asked in `clusters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy

from codegen.target import Capabilities
from fusion.schedule import contractions, scattered
from fusion.schedule.graph import Dependences
from fusion.schedule.space import Placement, Space, join, place
from lowering.expr import Expr, Index, Load
from lowering.indexing import invert, replace_axes, within
from lowering.program import Compute, Contract, Extern, Map, Reduce, Scan, Scatter

MAX_MEMBERS = 64
"""Nodes per kernel.  Longer chains gain little more and make register pressure and compile time grow."""


@dataclass(frozen=True, slots=True)
class Link:
    """Two nodes tied by a buffer: `first` writes it and `second` reads it (vertical), or both read it."""

    buffer: str
    first: int
    second: int
    vertical: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """Why two clusters may not be joined."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that share a space.

    Attributes:
        members: node positions, ascending.
        space: the axes the kernel walks.
        places: node → its axes in the space.  A member without a place is only ever inlined into its readers.
        extern: the single member is called as it is.
    """

    members: tuple[int, ...]
    space: Space
    places: Mapping[int, Placement]
    extern: bool = False


def single(dependences: Dependences, capabilities: Capabilities, position: int) -> Cluster:
    """The cluster of one node."""
    node = dependences.node(position)
    if isinstance(node, Extern):
        return Cluster((position,), Space((), ()), {}, extern=True)
    space = Space(node.axes, node.over, rigid=isinstance(node, Contract))
    if isinstance(node, Scatter):
        space = scattered.space_of(node, ordered=capabilities.ordered)
    if isinstance(node, Scan):  # its axis is walked as that of a row reduction is
        space = Space(tuple(axis for axis in node.axes if axis.symbol != node.along), (node.walked,))
    return Cluster((position,), space, {position: {axis.symbol: axis.symbol for axis in space.axes}})


def may_join(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster, link: Link
) -> Cluster | Refused:
    """The joined cluster, or the reason why there is none."""
    members = tuple(sorted((*first.members, *second.members)))
    for rule in (_same_device, _small_enough, _scatters_apart, _no_other_fold, _not_empty):
        reason = rule(dependences, capabilities, first, second, members)
        if reason is not None:
            return Refused(reason)
    refused: Refused | None = None
    for target, moved, target_node, moved_node in _directions(first, second, link):
        found = _place(dependences, target, moved, target_node, moved_node, link.buffer)
        if isinstance(found, str):
            refused = refused or Refused(found)
            continue
        space, places = found
        joined = Cluster(members, space, places)
        reason = _check(dependences, capabilities, joined, target, moved)
        if reason is None:
            return joined
        refused = Refused(reason)
    maps = all(isinstance(dependences.node(member), Map) for member in first.members)
    if link.vertical and maps:  # read through at whatever index the readers use
        joined = Cluster(members, second.space, second.places)
        if _check(dependences, capabilities, joined, second, first) is None:
            return joined
    assert refused is not None
    return refused


def may_stand_beside(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster
) -> Cluster | Refused:
    """Two clusters that share no tensor, as one that walks both: their axes have the same sizes, in order."""
    members = tuple(sorted((*first.members, *second.members)))
    for rule in (_same_device, _small_enough, _scatters_apart, _no_other_fold):
        reason = rule(dependences, capabilities, first, second, members)
        if reason is not None:
            return Refused(reason)
    pairs = zip(second.space.axes, first.space.axes, strict=True)
    change = {axis.symbol: other.symbol for axis, other in pairs if axis.symbol != other.symbol}
    sizes = first.space.sizes
    moved = {member: _compose(placement, change, sizes) for member, placement in second.places.items()}
    return Cluster(members, first.space, {**first.places, **moved})


# Rules that need no algebra -----------------------------------------------------------------------------------------


def _not_empty(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster, members: Sequence[int]
) -> str | None:
    empty = any(axis.size == 0 for axis in (*first.space.axes, *second.space.axes))
    return "an axis has no elements: there is nothing to share" if empty else None


def _same_device(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster, members: Sequence[int]
) -> str | None:
    buffers = dependences.program.buffers
    a, b = (buffers[dependences.compute(cluster.members[0]).out].device for cluster in (first, second))
    return None if a == b else f"different devices: {a} and {b}"


def _small_enough(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster, members: Sequence[int]
) -> str | None:
    if len(members) > MAX_MEMBERS:
        return f"the kernel would hold more than {MAX_MEMBERS} operations"
    touched: set[str] = set()
    for member in members:
        touched.update(load.buffer for load in dependences.loads[member])
        touched.add(dependences.compute(member).out)
    together = frozenset(members)
    inside = {dependences.compute(m).out for m in members if not dependences.stored(m, together)}
    if len(touched - inside) > capabilities.max_params:
        return f"the kernel would take more than {capabilities.max_params} tensors"
    return None


def _scatters_apart(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster, members: Sequence[int]
) -> str | None:
    return scattered.not_apart(dependences, members, (first.space, second.space))


def _no_other_fold(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster, members: Sequence[int]
) -> str | None:
    sides = [[dependences.compute(m) for m in cluster.members] for cluster in (first, second)]
    folds = [[node for node in side if not isinstance(node, Map)] for side in sides]
    if not all(folds) or not any(isinstance(node, Contract) for side in folds for node in side):
        return None
    if first.space.streamed or second.space.streamed:
        return "a walk of products shares its kernel with no other fold"
    if not all(isinstance(node, Contract) for side in folds for node in side):
        return "a contraction shares its kernel with no other fold"
    return None


# Placing one side in the space of the other -------------------------------------------------------------------------


def _directions(first: Cluster, second: Cluster, link: Link) -> Iterator[tuple[Cluster, Cluster, int, int]]:
    """(target, moved, node of target, node of moved) to try, best first: the side with folds keeps its space."""
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


def _place(
    dependences: Dependences, target: Cluster, moved: Cluster, target_node: int, moved_node: int, buffer: str
) -> tuple[Space, dict[int, Placement]] | str:
    target_index = _index(dependences, target, target_node, buffer)
    moved_index = _index(dependences, moved, moved_node, buffer)
    if target_index is None or moved_index is None:
        return "the two sides share no point at which they are walked"
    extents = dependences.program.buffers[buffer].shape
    known = [
        (a, b, extent)
        for a, b, extent in zip(target_index, moved_index, extents, strict=True)
        if a is not None and b is not None  # a dimension read through a gather ties nothing
    ]
    joined = join(target.space, [k[0] for k in known], moved.space, [k[1] for k in known], [k[2] for k in known])
    if isinstance(joined, str):
        return joined
    sizes = joined.space.sizes
    places: dict[int, Placement] = dict(target.places)
    if joined.target:
        places = {m: _compose(p, joined.target, sizes) for m, p in target.places.items()}
    places.update({m: _compose(p, joined.moved, sizes) for m, p in moved.places.items()})
    return joined.space, places


def _compose(placement: Placement, change: Placement, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> Placement:
    if not change:
        return placement
    return {axis: place(expr, change, sizes) for axis, expr in placement.items()}


def _index(
    dependences: Dependences, cluster: Cluster, position: int, buffer: str
) -> tuple[sympy.Expr | None, ...] | None:
    """The index at which a member touches `buffer`, over the cluster's axes; None in a dimension that is gathered."""
    axes = _axes_at(dependences, cluster, position)
    if axes is None:
        return None
    node = dependences.compute(position)
    if node.out == buffer:
        return tuple(axes[axis.symbol] for axis in node.axes)
    for load in dependences.loads[position]:
        if load.buffer == buffer:
            return tuple(_at(i, axes, cluster.space.sizes) for i in load.index)
    return None


def _axes_at(
    dependences: Dependences, cluster: Cluster, position: int
) -> Mapping[sympy.Symbol, sympy.Expr | None] | None:
    """Where a member's axes are in the space: its place, or for a member without one, where it is read first."""
    placed = cluster.places.get(position)
    if placed is not None:
        return placed
    node = dependences.compute(position)
    for reader in dependences.readers.get(node.out, ()):
        if reader in cluster.members:
            index = _index(dependences, cluster, reader, node.out)
            if index is not None:
                return {axis.symbol: i for axis, i in zip(node.axes, index, strict=True)}
    return None


def _at(
    index: Index, axes: Mapping[sympy.Symbol, sympy.Expr | None], sizes: Mapping[sympy.Symbol, sympy.Expr]
) -> sympy.Expr | None:
    """A load's index with the reader's axes replaced; None if it is gathered or depends on an axis that is."""
    if isinstance(index, Expr):
        return None
    if index.is_Symbol:
        return axes.get(index, index)
    known = {symbol: expr for symbol, expr in axes.items() if expr is not None}
    if len(known) != len(axes) and any(symbol in axes and axes[symbol] is None for symbol in index.free_symbols):
        return None
    return place(index, known, sizes)


# Rules about the joined cluster -------------------------------------------------------------------------------------


def _check(
    dependences: Dependences, capabilities: Capabilities, joined: Cluster, target: Cluster, moved: Cluster
) -> str | None:
    reason = _folds_stay_whole(dependences, joined, moved) or _folds_stay_inside(dependences, joined, moved)
    if reason is None and capabilities.ordered:
        reason = scattered.out_of_order(dependences, joined.places, joined.space)
    if reason is None:
        reason = _scans_stay_whole(dependences, joined)
    if reason is None:
        reason = _reads_agree(dependences, joined, (target, moved))
    if reason is None:
        reason = contractions.refused(dependences, joined.members, joined.space, joined.places)
    if reason is None:
        reason = _stores_once(dependences, joined)
    return reason


def _folds_stay_whole(dependences: Dependences, joined: Cluster, moved: Cluster) -> str | None:
    """A fold runs over all reduced axes of the space and is kept by parallel axes only."""
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
        walked = sympy.Mul(*(axis.size for axis in node.over))
        if walked != sympy.Mul(*(axis.size for axis in joined.space.reduced)):
            return "the reductions run over different lengths"
        if not _walks_each_once(node, placement, joined.space):
            return "a reduction would not meet each of its points once"
    return None


def _walks_each_once(node: Reduce, placement: Placement, space: Space) -> bool:
    """Do the reduced axes of the space run through all points that a fold runs over?"""
    over = [axis for axis in node.over if axis.size != 1]
    places, axes = [placement[axis.symbol] for axis in over], [axis for axis in space.reduced if axis.size != 1]
    if len(set(places)) == len(places) and {*places} == {axis.symbol for axis in axes}:
        return True
    values = [sympy.Symbol(f"v{k}", integer=True, nonnegative=True) for k in range(len(over))]
    found = invert(places, values, [axis.size for axis in over], [axis.symbol for axis in axes], space.sizes)
    return found is not None and not found.free


def _folds_stay_inside(dependences: Dependences, joined: Cluster, moved: Cluster) -> str | None:
    """A fold is made wherever its reader is, also where that looks past the ends (padding) and does not count it."""
    sizes = joined.space.sizes
    for member in moved.members:
        node = dependences.node(member)
        if isinstance(node, (Extern, Map)) or member not in joined.places:
            continue
        placement = joined.places[member]
        for axis in (*node.axes, *node.over):
            if axis.symbol in placement and not within(placement[axis.symbol], axis.size, sizes):
                return "a reduction is read past its ends"
    return None


def _scans_stay_whole(dependences: Dependences, joined: Cluster) -> str | None:
    """A scan walks the only reduced axis of the space, from its first point to its last."""
    walked = [axis.symbol for axis in joined.space.reduced if axis.size != 1]
    for member in joined.members:
        node = dependences.node(member)
        if not isinstance(node, Scan):
            continue
        if member not in joined.places:
            return "a scan cannot be read at another index than its own"
        at = joined.places[member]
        if walked != [at[node.along]]:
            return "a scan would not walk its axis alone, from the first point to the last"
        if any(at[axis.symbol].free_symbols & {*walked} for axis in node.axes if axis.symbol != node.along):
            return "a scan is read across the axis that it walks"
    return None


def _reads_agree(dependences: Dependences, joined: Cluster, sides: tuple[Cluster, Cluster]) -> str | None:
    """A fold is read exactly where it was computed; anything else may be recomputed at any index.

    What one side reads of its own is known to agree: joining moves both ends alike.
    """
    first = frozenset(sides[0].members)
    by_out = {dependences.compute(m).out: m for m in joined.members}
    folded: set[int] = set()
    for member in joined.members:
        node = dependences.compute(member)
        if not isinstance(node, Map):
            folded.add(member)
        for load in dependences.loads[member]:
            producer = by_out.get(load.buffer)
            if producer is None or producer not in folded:
                continue
            folded.add(member)
            if (producer in first) == (member in first) and producer in joined.places:
                continue
            if joined.space.rigid and not isinstance(node, Map):
                return "a fold would feed the contraction"
            placement = joined.places.get(member)  # without one, its readers are asked
            if placement is not None and not _meets(dependences, joined, folded, load, placement):
                return "a reduced value is read at an index other than its own"
    return None


def _meets(
    dependences: Dependences,
    cluster: Cluster,
    folded: set[int],
    load: Load,
    axes: Mapping[sympy.Symbol, Index],
) -> bool:
    """Does a load, in a reader whose axes are at `axes`, see every fold it depends on at the fold's own point?

    A map between the fold and the reader may be recomputed elsewhere (a gather from log-probabilities) as long as that
    leads to the same fold.
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
        _meets(dependences, cluster, folded, part, inner)
        for part in dependences.loads[producer]
        if dependences.writer.get(part.buffer) in folded
    )


def _stores_once(dependences: Dependences, joined: Cluster) -> str | None:
    """What is needed outside is computed at every point exactly once, before or after the folds but not beside them."""
    reduced = {axis.symbol for axis in joined.space.reduced if axis.size != 1}
    together = frozenset(joined.members)
    for member in joined.members:
        if not dependences.stored(member, together) and not isinstance(dependences.node(member), Scatter):
            continue
        if member not in joined.places:
            return "the tensor is needed elsewhere too, and is read here at other points than it is made"
        missing = _unspanned(dependences.compute(member), joined.places[member], joined.space)
        if missing is None:
            return "the tensor is needed elsewhere too, and its axes are not a rearrangement of the kernel's"
        missing -= joined.space.held
        if not missing <= reduced or (missing and missing != reduced):
            return "the tensor is needed elsewhere too, and is smaller than what the kernel walks"
        if joined.space.rigid and not missing:
            return "an operand of a contraction is needed elsewhere too"
    return None


def _unspanned(node: Compute, placement: Placement, space: Space) -> set[sympy.Symbol] | None:
    """The axes of `space` that a node does not span; None if its placement is no bijection."""
    exprs = [placement[axis.symbol] for axis in node.axes]
    plain = [expr for expr in exprs if expr.is_Symbol]
    sizes = space.sizes
    if len(set(plain)) == len(plain) and all(
        (e.is_Symbol and sizes.get(e) == axis.size) or (e == 0 and axis.size == 1)
        for e, axis in zip(exprs, node.axes, strict=True)
    ):
        return {axis.symbol for axis in space.axes if axis.size != 1} - set(plain)
    values = tuple(sympy.Symbol(f"v{k}", integer=True, nonnegative=True) for k in range(len(exprs)))
    inverse = invert(exprs, values, [axis.size for axis in node.axes], [a.symbol for a in space.axes], sizes)
    return None if inverse is None else {s for s in inverse.free if sizes[s] != 1}


__all__ = ["Cluster", "Link", "Refused", "may_join", "may_stand_beside", "single"]
