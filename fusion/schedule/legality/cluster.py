"""Clusters: nodes that share a space, and what ties two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from codegen.target import Capabilities
from fusion.schedule import scattered
from fusion.schedule.graph import Dependences
from fusion.schedule.space import Placement, Space
from lowering.program import Contract, Extern, Scan, Scatter


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
