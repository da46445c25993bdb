"""Interface: what running a finished graph needs to know of the fx graph that it was made of.

Input: an ATen graph; output: values that can be written (`form.py`), so that a process which never saw the graph can
run what was made of it, or its operations as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fusion.graph_cache.form import Unwritten
from fusion.graph_cache.key import held_by
from fusion.joint.saved_inputs import is_tangent
from fusion.lowering.arguments import map_leaves


@dataclass(frozen=True, slots=True)
class Place:
    """The result of an earlier operation, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One node: what it does, of what, and a tensor that it holds."""

    op: str
    name: str
    target: object
    args: object
    kwargs: object
    held: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Interface:
    """What a graph is called with and gives, as far as its caller has to know.

    Attributes:
        label: what the graph is ("forward", "backward", "inference").
        device: the device that it computes on.
        kept: the positions of results that backward alone gets.
        tangents: the positions of inputs that are gradients.
    """

    label: str
    device: torch.device
    kept: frozenset[int]
    tangents: tuple[int, ...]

    @classmethod
    def of(cls, graph: fx.GraphModule, label: str, device: torch.device, kept: frozenset[int]) -> Interface:
        """The interface of a graph that computes on `device`, and of whose results backward alone gets `kept`."""
        return cls(label, device, kept, tangents_of(graph))


def tangents_of(graph: fx.GraphModule) -> tuple[int, ...]:
    """The positions of those inputs of a graph that are gradients."""
    holders = graph.graph.find_nodes(op="placeholder")
    return tuple(k for k, holder in enumerate(holders) if is_tangent(holder))


def operations_of(graph: fx.GraphModule) -> tuple[Operation, ...]:
    """The operations of a graph, as they are.

    Raises:
        Unwritten: one of them holds something else than a tensor.
    """
    numbers: dict[fx.Node, int] = {}
    found: list[Operation] = []

    def told(argument: object) -> object:
        return Place(numbers[argument]) if isinstance(argument, fx.Node) else argument

    for node in graph.graph.nodes:
        held = held_by(graph, node) if node.op == "get_attr" else None
        if held is not None and not isinstance(held, torch.Tensor):
            raise Unwritten(f"{node.target}, a {type(held).__name__}")
        given = map_leaves(node.args, told), map_leaves(node.kwargs, told)
        found.append(Operation(node.op, node.name, node.target, *given, held))
        numbers[node] = len(numbers)
    return tuple(found)


def graph_of(operations: tuple[Operation, ...]) -> fx.GraphModule:
    """The graph of `operations`."""
    graph = fx.Graph()
    holder = torch.nn.Module()
    made: list[fx.Node] = []

    def given(argument: object) -> object:
        return made[argument.number] if isinstance(argument, Place) else argument

    for each in operations:
        if each.op == "get_attr":
            name = f"held_{len(made)}"
            holder.register_buffer(name, each.held)
            node = graph.get_attr(name)
        else:
            args, kwargs = map_leaves(each.args, given), map_leaves(each.kwargs, given)
            node = graph.create_node(each.op, each.target, args, kwargs, each.name)  # type: ignore[arg-type]  # as they were read from a graph
        made.append(node)
    return fx.GraphModule(holder, graph)


__all__ = ["Interface", "Operation", "Place", "graph_of", "operations_of", "tangents_of"]
