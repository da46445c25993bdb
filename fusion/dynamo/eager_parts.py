"""Splits a captured graph around operations that run uncompiled.

    y = f(x);  y[mask] = v;  return g(y)      becomes      y = part_0(x);  y[mask] = v;  return part_1(y)

Input: Dynamo's graph, the operations to run as they are, and a compiler of the parts between them; output: a graph that
calls one after the other, in program order, so that mutations and random draws keep their order.  Each part is a
separate program that takes results of earlier ones, of any size and type: it is captured, guarded and compiled when it
is first called.  If there are only views between two operations, these run uncompiled, too.

A mode (autocast) that is entered before such an operation and left after it is entered and left between the parts, too,
as are switches of gradients.

Refused are graphs with function transformations (`torch.func.vmap`): their levels would be cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from fusion.dynamo.untraceable import is_number_of_input
from fusion.dynamo.writes import memory_of, written_by

LEVELS = ("torch._C._functorch", "torch._functorch")
"""Modules of the functions that enter and leave a transformation."""


def can_split(graph: fx.GraphModule) -> bool:
    """Return whether the graph has no transformations."""
    return not any(str(getattr(node.target, "__module__", "")).startswith(LEVELS) for node in graph.graph.nodes)


def compile_in_parts(
    graph: fx.GraphModule,
    uncompiled: Collection[fx.Node],
    compile_part: Callable[[fx.GraphModule], Callable[..., object]],
) -> fx.GraphModule:
    """Return a graph that calls the `uncompiled` operations, and the parts between them as compiled."""
    whole, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    held: dict[str, object] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = _copied(whole, node, copies)
        if node.op == "get_attr":
            held[str(node.target)] = operator.attrgetter(str(node.target))(graph)
    for alone, nodes in _runs(graph, uncompiled):
        if alone:
            for node in nodes:
                copies[node] = _copied(whole, node, copies)
            continue
        inputs, results = _edges(nodes)
        name = f"part_{len(held)}"
        part = fx.GraphModule(graph, _part(nodes, inputs, results))
        forward = type(part).forward
        forward.__code__ = forward.__code__.replace()  # Dynamo skips code objects that exist while it compiles
        held[name] = compile_part(part)
        call = whole.call_module(name, tuple(copies[node] for node in inputs))
        for k, node in enumerate(results):
            copies[node] = whole.call_function(operator.getitem, (call, k))
    whole.node_copy(graph.graph.output_node(), copies.__getitem__)
    return fx.GraphModule(held, whole)


def _runs(graph: fx.GraphModule, uncompiled: Collection[fx.Node]) -> Iterator[tuple[bool, list[fx.Node]]]:
    """Yield groups of operations in order: alternately uncompiled ones and those between them."""
    calls = [node for node in graph.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    numbers = list(filter(is_number_of_input, calls))  # nothing changes these: all are read first
    separate = {*numbers, *uncompiled, *filter(_sets_mode, calls), *_modes_around(calls, uncompiled)}
    calls = [*numbers, *(node for node in calls if node not in numbers)]
    for is_alone, group in groupby(calls, separate.__contains__):
        nodes = list(group)
        yield is_alone or not any(map(_computes, nodes)), nodes


def _computes(node: fx.Node) -> bool:
    """Return whether a call computes something, rather than views of existing tensors."""
    operand_memory = {memory for arg in node.all_input_nodes for memory in _memories(arg)}
    return written_by(node) is not None or not operand_memory.issuperset(_memories(node))


def _memories(node: fx.Node) -> Iterator[int | None]:
    return (memory_of(value) for value in tree_leaves(node.meta.get("example_value")) if isinstance(value, Tensor))


def _sets_mode(node: fx.Node) -> bool:
    """Return whether a call switches gradients on or off; a part that leaves them otherwise need not say so."""
    return "example_value" not in node.meta and not node.users and not node.all_input_nodes


def _modes_around(calls: Sequence[fx.Node], uncompiled: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yield the calls that enter and leave modes around uncompiled operations: a mode is no graph value."""
    positions = {node: k for k, node in enumerate(calls)}
    for enter in calls:
        if "example_value" not in enter.meta and enter.users:
            last = max(positions.get(user, len(calls)) for user in enter.users)
            if any(positions[enter] < positions[node] < last for node in uncompiled):
                yield from (enter, *enter.users)


def _edges(nodes: Collection[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return (the inputs of a part, the nodes of the part that are read outside of it)."""
    own = set(nodes)
    read = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes)
    inputs = [node for node in read if node not in own and node.op != "get_attr"]
    return inputs, [node for node in nodes if not own.issuperset(node.users)]


def _part(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.Graph:
    part = fx.Graph()
    copies = {node: part.placeholder(node.name) for node in inputs}
    for node in nodes:
        for arg in node.all_input_nodes:
            if arg not in copies:
                copies[arg] = _copied(part, arg, copies)  # a `get_attr` node: an attribute of the graph
        copies[node] = _copied(part, node, copies)
    part.output(tuple(copies[node] for node in results))
    return part


def _copied(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Copy `node` to another graph, without the tensors that it was traced with."""
    copied = graph.node_copy(node, copies.__getitem__)
    for key in ("example_value", "grapharg"):
        copied.meta.pop(key, None)
    return copied
