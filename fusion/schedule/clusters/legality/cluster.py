"""Defines clusters (nodes that share an iteration space) and links between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from typing_extensions import assert_never

from fusion.codegen.target import Capabilities
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import Contract, Extern, Map, Program, Reduce, Scan, Scatter, writes
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


class SeveralLoops(Exception):
    """Raised where a cluster that loops over tiles needs a second loop, as its members allow no online form."""


@dataclass(frozen=True, slots=True)
class CannotJoin:
    """The reason why two clusters may not be joined."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that share an iteration space.

    Attributes:
        members: node positions, ascending.
        space: the axes of the kernel.
        places: node → its axes in the space.  A member without a placement is only ever inlined into its readers.
        extern: the single member stays a library call.
    """

    members: tuple[int, ...]
    space: Space
    places: Mapping[int, Placement]
    extern: bool = False

    @classmethod
    def of(cls, space: Space, places: Mapping[int, Placement]) -> Cluster:
        """Return the cluster of the nodes that have a placement in a space."""
        return cls(tuple(sorted(places)), space, places)

    def by_name(self, program: Program) -> dict[str, Placement]:
        """Return the placements by result: names are stable when a pass adds or removes nodes."""
        return {writes(program.nodes[position])[0]: placement for position, placement in self.places.items()}


def positions_in(changed: Program, program: Program, clusters: Iterable[Cluster]) -> tuple[Cluster, ...]:
    """Map clusters of `program` to `changed`, where their nodes have other positions or were inlined."""
    position_of = positions(changed)
    mapped = []
    for cluster in clusters:
        named = cluster.by_name(program)
        places = {position_of[name]: placement for name, placement in named.items() if name in position_of}
        mapped.append(replace(cluster, members=tuple(sorted(places)), places=places))
    return tuple(mapped)


def positions(program: Program) -> dict[str, int]:
    """Return buffer → the position of the node that computes it."""
    return {name: position for position, node in enumerate(program.nodes) for name in writes(node)}


def single(dependences: Dependences, capabilities: Capabilities, position: int) -> Cluster:
    """Return the cluster of one node."""
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
        case Scan():  # its axis is looped over as in a row reduction
            space = Space(tuple(axis for axis in node.axes if axis.symbol != node.along), (node.scanned,))
        case _:
            assert_never(node)
    return Cluster((position,), space, {position: {axis.symbol: axis.symbol for axis in space.axes}})
