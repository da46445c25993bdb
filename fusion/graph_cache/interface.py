"""Describes the interface of a finished graph, without its fx graph.

Input: an ATen graph; output: serialisable values (`serialise.py`), with which a process that never saw the graph can
run its compilation, or its operations eagerly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fusion.graph_cache.key import held_by
from fusion.graph_cache.serialise import Unwritten
from fusion.joint.dependence import is_tangent
from fusion.lowering.ir.arguments import map_leaves


@dataclass(frozen=True, slots=True)
class EarlierResult:
    """The result of an earlier operation, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One node: operation, arguments, and the tensor that it holds, if any."""

    op: str
    name: str
    target: object
    args: object
    kwargs: object
    held: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Interface:
    """The calling convention of a graph.

    Attributes:
        label: "forward", "backward" or "inference".
        device: the device that it computes on.
        kept: the positions of results that only backward gets.
        tangents: the positions of inputs that are gradients.
    """

    label: str
    device: torch.device
    kept: frozenset[int]
    tangents: tuple[int, ...]

    @classmethod
    def of(cls, graph: fx.GraphModule, label: str, device: torch.device, kept: frozenset[int]) -> Interface:
        """Return the interface of a graph on `device`; `kept`: the positions of results that only backward gets."""
        return cls(label, device, kept, tangents_of(graph))


def tangents_of(graph: fx.GraphModule) -> tuple[int, ...]:
    """Return the positions of the inputs that are gradients."""
    holders = graph.graph.find_nodes(op="placeholder")
    return tuple(k for k, holder in enumerate(holders) if is_tangent(holder))


def operations_of(graph: fx.GraphModule) -> tuple[Operation, ...]:
    """Return the operations of a graph.

    Raises:
        Unwritten: a node holds something other than a tensor.
    """
    numbers: dict[fx.Node, int] = {}
    operations: list[Operation] = []

    def numbered(argument: object) -> object:
        return EarlierResult(numbers[argument]) if isinstance(argument, fx.Node) else argument

    for node in graph.graph.nodes:
        held = held_by(graph, node) if node.op == "get_attr" else None
        if held is not None and not isinstance(held, torch.Tensor):
            raise Unwritten(f"{node.target}, a {type(held).__name__}")
        arguments = map_leaves(node.args, numbered), map_leaves(node.kwargs, numbered)
        operations.append(Operation(node.op, node.name, node.target, *arguments, held))
        numbers[node] = len(numbers)
    return tuple(operations)


def graph_of(operations: tuple[Operation, ...]) -> fx.GraphModule:
    """Return the graph of `operations`."""
    graph = fx.Graph()
    holder = torch.nn.Module()
    nodes: list[fx.Node] = []

    def argument_of(argument: object) -> object:
        return nodes[argument.number] if isinstance(argument, EarlierResult) else argument

    for each in operations:
        if each.op == "get_attr":
            name = f"held_{len(nodes)}"
            holder.register_buffer(name, each.held)
            node = graph.get_attr(name)
        else:
            args, kwargs = map_leaves(each.args, argument_of), map_leaves(each.kwargs, argument_of)
            node = graph.create_node(each.op, each.target, args, kwargs, each.name)  # type: ignore[arg-type]  # as they were read from a graph
        nodes.append(node)
    return fx.GraphModule(holder, graph)


__all__ = ["EarlierResult", "Interface", "Operation", "graph_of", "operations_of", "tangents_of"]
