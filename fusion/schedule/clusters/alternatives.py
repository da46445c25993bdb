"""Prices the alternatives for a cluster around products.

They are: one kernel, the library's calls between kernels, a product in parts, and operands that are stored before.  An
alternative names the nodes that replace the cluster's, or those that do not share a kernel; the passes that follow make
kernels of them as of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fusion.codegen.tuning import Trial, Tuning
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Buffer, BufferRef, Node, Program, reads, writes
from fusion.schedule.clusters.legality import Cluster

ONE_KERNEL, LIBRARY = "one kernel", "the library"
"""The names of the alternatives that every cluster around products has."""
OPERANDS_STORED = "operands stored before"
"""The name of the alternative that a cluster has if it computes operands."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One alternative for a cluster, with its predicted microseconds.

    `instead`, `buffers` and `took` are those of `ClusterCut`, `apart` is that of `Program`.  `reader`: the nodes that
    read the cluster's results and whose kernel takes its epilogue; predictions of all alternatives include their time.
    """

    name: str
    predicted: float
    instead: Mapping[int, tuple[Node, ...]] = field(default_factory=dict)
    buffers: tuple[tuple[Buffer, str], ...] = ()
    took: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    apart: frozenset[tuple[str, str]] = frozenset()
    reader: tuple[int, ...] = ()


Measure: TypeAlias = Callable[[Program, Cluster, Kernel, Sequence[Alternative]], Tuning]
"""Builds and times the alternatives for a cluster, the first of which is the kernel that is passed."""


def weighed(kernel: Kernel, ways: Sequence[Alternative], reason: str = "") -> Tuning:
    """Choose the alternative with the lowest prediction, the last among equals; `reason` says why nothing was timed."""
    trials = tuple(Trial(way.name, way.predicted) for way in ways)
    least = min(trial.predicted for trial in trials)
    chosen = max(number for number, trial in enumerate(trials) if trial.predicted == least)
    return Tuning(kernel.name, trials, chosen, reason)


def nodes_of(cluster: Cluster, ways: Sequence[Alternative]) -> tuple[int, ...]:
    """Return the nodes that the alternatives for a cluster compute, in order."""
    return tuple(sorted({*cluster.members, *(node for way in ways for node in way.reader)}))


def alone(program: Program, members: Collection[int]) -> Program:
    """Return some nodes as a program of its own."""
    nodes = tuple(program.nodes[member] for member in sorted(members))
    results = [name for node in nodes for name in writes(node)]
    needed = {name for k, node in enumerate(program.nodes) if k not in members for name in reads(node)}
    needed |= program.output_names()
    inputs = tuple(dict.fromkeys(name for node in nodes for name in reads(node) if name not in results))
    outputs = tuple(BufferRef(name) for name in results if name in needed)
    library = {out: calls for out, calls in program.library.items() if out in results}
    return replace(program, inputs=inputs, constants={}, nodes=nodes, outputs=outputs, library=library)


def moved(members: Sequence[int], way: Alternative) -> Alternative:
    """Renumber an alternative for the program of its nodes `alone`, which are in order."""
    return replace(way, instead={members.index(position): nodes for position, nodes in way.instead.items()})
