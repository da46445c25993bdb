"""Clusters: nodes that share a space, and what ties two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from typing_extensions import assert_never

from fusion.codegen.target import Capabilities
from fusion.lowering.chunks import Chunked
from fusion.lowering.program import Contract, Extern, Map, Program, Reduce, Scan, Scatter, writes
from fusion.schedule.iteration import scattered
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Placement, Space


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

    @classmethod
    def of(cls, space: Space, places: Mapping[int, Placement]) -> Cluster:
        """The nodes that have a place in a space."""
        return cls(tuple(sorted(places)), space, places)

    def by_name(self, program: Program) -> dict[str, Placement]:
        """The places by what the nodes make: names stay where a pass adds nodes or takes some away."""
        return {writes(program.nodes[position])[0]: placement for position, placement in self.places.items()}


def positions_in(changed: Program, program: Program, clusters: Iterable[Cluster]) -> tuple[Cluster, ...]:
    """Clusters of `program` as clusters of `changed`, where their nodes stand elsewhere or were inlined."""
    position_of = positions(changed)
    found = []
    for cluster in clusters:
        named = cluster.by_name(program)
        places = {position_of[name]: placement for name, placement in named.items() if name in position_of}
        found.append(replace(cluster, members=tuple(sorted(places)), places=places))
    return tuple(found)


def positions(program: Program) -> dict[str, int]:
    """Buffer → the node that makes it."""
    return {name: position for position, node in enumerate(program.nodes) for name in writes(node)}


def single(dependences: Dependences, capabilities: Capabilities, position: int) -> Cluster:
    """The cluster of one node."""
    node = dependences.node(position)
    match node:
        case Extern() | Chunked():
            return Cluster((position,), Space((), ()), {}, extern=True)
        case Map() | Reduce():
            space = Space(node.axes, node.over)
        case Contract():
            space = Space(node.axes, node.over, rigid=True)
        case Scatter():
            space = scattered.space_of(node, ordered=capabilities.ordered)
        case Scan():  # its axis is walked as that of a row reduction is
            space = Space(tuple(axis for axis in node.axes if axis.symbol != node.along), (node.scanned,))
        case _:
            assert_never(node)
    return Cluster((position,), space, {position: {axis.symbol: axis.symbol for axis in space.axes}})
