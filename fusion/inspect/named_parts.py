"""Names the parts of the subjects of passes, so that the runner can tell which of them a pass changed.

Input: a subject; output: name → a value that is equal as long as the part is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fusion.lowering.ir.program import Program, writes
from fusion.schedule import Clustering, Step
from fusion.schedule.kernels import KernelCall
from fusion.schedule.launches.launch import makes


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """The target and the arguments of an fx node, which fx replaces rather than changes."""

    target: object
    args: object
    kwargs: object

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Written):
            return NotImplemented
        return _same(self.target, other.target) and _same(self.args, other.args) and _same(self.kwargs, other.kwargs)

    __hash__ = None  # type: ignore[assignment]  # compared, never hashed


def _same(one: object, other: object) -> bool:
    """Compare arguments without comparing symbolic sizes, which would add guards: these are equal if identical."""
    if one is other:
        return True
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and isinstance(one, _PLAIN) and one == other


_PLAIN = (int, float, complex, str, torch.dtype, torch.device)
"""Types of arguments that are compared by value."""


def graph_parts(graph: fx.GraphModule) -> Mapping[str, object]:
    """Return the nodes of an fx graph by name; marks in their `meta` are no part of them."""
    return {node.name: _Written(node.target, node.args, node.kwargs) for node in graph.graph.nodes}


def halves_parts(forward: fx.GraphModule, backward: fx.GraphModule) -> Mapping[str, object]:
    """Return the nodes of both graphs, under the names of their graphs."""
    halves = {"forward": forward, "backward": backward}
    return {f"{half}.{name}": part for half, graph in halves.items() for name, part in graph_parts(graph).items()}


def program_parts(program: Program) -> Mapping[str, object]:
    """Return the nodes of a program by their first result."""
    return {_name(writes(node), number): node for number, node in enumerate(program.nodes)}


def cluster_parts(program: Program, clustering: Clustering | None) -> Mapping[str, object]:
    """Return the nodes of each cluster by its last result; before there are clusters, each node by its own."""
    members = (
        [(k,) for k in range(len(program.nodes))] if clustering is None else [c.members for c in clustering.clusters]
    )
    groups = [[program.nodes[member] for member in each] for each in members]
    return {_name(writes(nodes[-1]), number): tuple(nodes) for number, nodes in enumerate(groups)}


def launch_parts(steps: Sequence[Step]) -> Mapping[str, object]:
    """Return launches and calls by their first result; launches are compared by kernel and tensors."""
    return {_name(makes(step), number): _launch(step) for number, step in enumerate(steps)}


def _launch(step: Step) -> object:
    return (step.kernel, step.buffers, step.written, dict(step.over)) if isinstance(step, KernelCall) else step


def _name(results: Sequence[str], number: int) -> str:
    return next(iter(results), f"step {number}")


__all__ = ["cluster_parts", "graph_parts", "halves_parts", "launch_parts", "program_parts"]
