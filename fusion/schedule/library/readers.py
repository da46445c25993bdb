"""Finds the kernel that would compute the epilogue of a product, if the library computed the product.

A fold over the rows of `linear(x) + residual` cannot be part of the product, whose tiles do not hold whole rows.  After
the library's product it can compute the sum itself: there is no kernel for the epilogue then, and the sum is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusion.lowering.ir.program import writes
from fusion.schedule.clusters.legality import CannotJoin, Cluster, Link, SeveralLoops, may_join, single
from fusion.schedule.clusters.profit import Prices
from fusion.schedule.iteration.dependences import Dependences


@dataclass(frozen=True, slots=True)
class EpilogueReader:
    """A cluster that reads the results of an epilogue, with its microseconds alone and with the epilogue."""

    cluster: Cluster
    alone: float
    joined: float


def reader_of(prices: Prices, clusters: Mapping[int, Cluster], epilogue: Sequence[int]) -> EpilogueReader | None:
    """Return the cluster that takes an epilogue at the lowest price; None if none can.

    Args:
        clusters: node → its cluster.
        epilogue: the members of a cluster that follow its products, in the order of the program.
    """
    read = {reader for member in epilogue for _, reader in _read(prices.dependences, member)}
    found: dict[tuple[int, ...], EpilogueReader] = {}
    for cluster in (clusters[reader] for reader in sorted(read.difference(epilogue))):
        if cluster.extern or cluster.space.rigid or cluster.members in found:
            continue
        joined = _joined(prices, cluster, epilogue)
        if joined is None:
            continue
        try:
            found[cluster.members] = EpilogueReader(cluster, prices.time(cluster), prices.time(joined))
        except SeveralLoops:
            continue
    return min(found.values(), key=lambda reader: reader.joined - reader.alone, default=None)


def _joined(prices: Prices, reader: Cluster, epilogue: Sequence[int]) -> Cluster | None:
    """Return a cluster with the members of an epilogue added, the last ones first; None if that is not allowed."""
    dependences, joined = prices.dependences, reader
    for member in reversed(epilogue):
        reads = ((name, at) for name, at in _read(dependences, member) if at in joined.members)
        link = next((Link(name, member, at, vertical=True) for name, at in reads), None)
        if link is None:
            return None
        alone = single(dependences, prices.capabilities, member)
        outcome = may_join(dependences, prices.capabilities, alone, joined, link)
        if isinstance(outcome, CannotJoin):
            return None
        joined = outcome
    return None if _leaves_and_returns(dependences, joined.members) else joined


def _read(dependences: Dependences, member: int) -> Iterator[tuple[str, int]]:
    """Yield the results of a node with the nodes that read them."""
    for name in writes(dependences.node(member)):
        yield from ((name, reader) for reader in dependences.readers.get(name, ()))


def _leaves_and_returns(dependences: Dependences, members: Sequence[int]) -> bool:
    """Return whether a path leads from one of these nodes over another node back to one of them."""
    inside, last = set(members), max(members)
    pending = [after for member in members for after in dependences.graph.successors(member) if after not in inside]
    seen = set(pending)
    while pending:
        here = pending.pop()
        if here > last:  # nodes come after those that they read
            continue
        for after in dependences.graph.successors(here):
            if after in inside:
                return True
            if after not in seen:
                seen.add(after)
                pending.append(after)
    return False
