"""Joins two clusters: applies the rules in order, for each way to place one in the space of the other."""

from __future__ import annotations

from fusion.codegen.target import Capabilities
from fusion.lowering.ir.program import Map
from fusion.schedule.clusters.legality.cluster import CannotJoin, Cluster, Link
from fusion.schedule.clusters.legality.joined import refusal_of
from fusion.schedule.clusters.legality.pairs import (
    ClusterPair,
    no_other_fold,
    not_empty,
    same_device,
    scatters_apart,
    small_enough,
    stored_before_products,
    stored_where_ranked,
)
from fusion.schedule.clusters.legality.placing import directions, moved_by, placed_in
from fusion.schedule.iteration.dependences import Dependences

_RULES = (
    same_device,
    small_enough,
    stored_before_products,
    scatters_apart,
    no_other_fold,
    stored_where_ranked,
    not_empty,
)


def may_join(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster, link: Link
) -> Cluster | CannotJoin:
    """Return the joined cluster, or the reason why there is none."""
    members = tuple(sorted((*first.members, *second.members)))
    pair = ClusterPair(dependences, capabilities, first, second, members)
    for rule in _RULES:
        reason = rule(pair)
        if reason is not None:
            return CannotJoin(reason)
    refused: CannotJoin | None = None
    for target, moved, target_node, moved_node in directions(first, second, link):
        placement = placed_in(dependences, target, moved, target_node, moved_node, link.buffer)
        if isinstance(placement, str):
            refused = refused or CannotJoin(placement)
            continue
        space, places = placement
        joined = Cluster(members, space, places)
        reason = refusal_of(dependences, capabilities, joined, target, moved)
        if reason is None:
            return joined
        refused = CannotJoin(reason)
    maps = all(isinstance(dependences.node(member), Map) for member in first.members)
    if link.vertical and maps:  # inlined at whatever index the readers use
        joined = Cluster(members, second.space, second.places)
        if refusal_of(dependences, capabilities, joined, second, first) is None:
            return joined
    assert refused is not None
    return refused


def may_share_body(
    dependences: Dependences, capabilities: Capabilities, first: Cluster, second: Cluster
) -> Cluster | CannotJoin:
    """Join two clusters without a common tensor over one space: their axes have the same sizes, in order."""
    members = tuple(sorted((*first.members, *second.members)))
    pair = ClusterPair(dependences, capabilities, first, second, members)
    for rule in (same_device, small_enough, scatters_apart, no_other_fold):
        reason = rule(pair)
        if reason is not None:
            return CannotJoin(reason)
    pairs = zip(second.space.axes, first.space.axes, strict=True)
    change = {axis.symbol: other.symbol for axis, other in pairs if axis.symbol != other.symbol}
    sizes = first.space.sizes
    moved = {member: moved_by(placement, change, sizes) for member, placement in second.places.items()}
    return Cluster(members, first.space, {**first.places, **moved})
