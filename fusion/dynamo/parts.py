"""Parts: a captured graph around operations that are to run as they are.

    y = f(x);  y[mask] = v;  return g(y)      becomes      y = part_0(x);  y[mask] = v;  return part_1(y)

Input: Dynamo's graph, the operations that go apart, and what compiles the parts between them; output: a graph that
calls one after the other, in the program's order, so that what is changed in place or drawn at random stays where it
was.  Each part is a program of its own, given what earlier ones made, of whatever size and type that is: it is
captured, guarded and compiled when it is first called.  Where there are only views between two operations, these run as
they are, too.

A mode (autocast) that is entered before such an operation and left after it is entered and left between the parts, too,
and gradients are turned on and off between them.
Refused are graphs with transformations of functions (`torch.func.vmap`): their levels would be cut.
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
"""Where functions come from that enter and leave a transformation."""


def can_part(graph: fx.GraphModule) -> bool:
    """Is the graph without transformations?"""
    return not any(str(getattr(node.target, "__module__", "")).startswith(LEVELS) for node in graph.graph.nodes)


def in_parts(
    graph: fx.GraphModule, apart: Collection[fx.Node], compile_part: Callable[[fx.GraphModule], Callable[..., object]]
) -> fx.GraphModule:
    """What calls the operations `apart` of `graph`, and what `compile_part` makes of those between them."""
    whole, made = fx.Graph(), dict[fx.Node, fx.Node]()
    held: dict[str, object] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            made[node] = _copied(whole, node, made)
        if node.op == "get_attr":
            held[str(node.target)] = operator.attrgetter(str(node.target))(graph)
    for alone, nodes in _runs(graph, apart):
        if alone:
            for node in nodes:
                made[node] = _copied(whole, node, made)
            continue
        given, results = _edges(nodes)
        name = f"part_{len(held)}"
        part = fx.GraphModule(graph, _part(nodes, given, results))
        forward = type(part).forward
        forward.__code__ = forward.__code__.replace()  # what is generated while Dynamo compiles, it would skip
        held[name] = compile_part(part)
        call = whole.call_module(name, tuple(made[node] for node in given))
        for k, node in enumerate(results):
            made[node] = whole.call_function(operator.getitem, (call, k))
    whole.node_copy(graph.graph.output_node(), made.__getitem__)
    return fx.GraphModule(held, whole)


def _runs(graph: fx.GraphModule, apart: Collection[fx.Node]) -> Iterator[tuple[bool, list[fx.Node]]]:
    """Operations in their order, those that stand apart and those between them in turn."""
    calls = [node for node in graph.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    numbers = list(filter(is_number_of_input, calls))  # nothing changes these: all are read first
    alone = {*numbers, *apart, *filter(_sets_mode, calls), *_modes_around(calls, apart)}
    calls = [*numbers, *(node for node in calls if node not in numbers)]
    for is_alone, group in groupby(calls, alone.__contains__):
        nodes = list(group)
        yield is_alone or not any(map(_computes, nodes)), nodes


def _computes(node: fx.Node) -> bool:
    """Does a call make numbers, rather than views of what there is?"""
    given = {memory for arg in node.all_input_nodes for memory in _memories(arg)}
    return written_by(node) is not None or not given.issuperset(_memories(node))


def _memories(node: fx.Node) -> Iterator[int | None]:
    return (memory_of(value) for value in tree_leaves(node.meta.get("example_value")) if isinstance(value, Tensor))


def _sets_mode(node: fx.Node) -> bool:
    """Does a call turn gradients on or off?  A part that leaves them otherwise than it found them need not say so."""
    return "example_value" not in node.meta and not node.users and not node.all_input_nodes


def _modes_around(calls: Sequence[fx.Node], apart: Collection[fx.Node]) -> Iterator[fx.Node]:
    """What enters and leaves modes around operations that go apart: what is entered is no value to Dynamo."""
    places = {node: k for k, node in enumerate(calls)}
    for enter in calls:
        if "example_value" not in enter.meta and enter.users:
            last = max(places.get(user, len(calls)) for user in enter.users)
            if any(places[enter] < places[node] < last for node in apart):
                yield from (enter, *enter.users)


def _edges(nodes: Collection[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """What a part is given, and what of it is read outside."""
    own = set(nodes)
    read = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes)
    given = [node for node in read if node not in own and node.op != "get_attr"]
    return given, [node for node in nodes if not own.issuperset(node.users)]


def _part(nodes: Sequence[fx.Node], given: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.Graph:
    part = fx.Graph()
    made = {node: part.placeholder(node.name) for node in given}
    for node in nodes:
        for arg in node.all_input_nodes:
            if arg not in made:
                made[arg] = _copied(part, arg, made)  # what the graph holds
        made[node] = _copied(part, node, made)
    part.output(tuple(made[node] for node in results))
    return part


def _copied(graph: fx.Graph, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """`node` in another graph, without the tensors that it was traced with."""
    copied = graph.node_copy(node, made.__getitem__)
    for key in ("example_value", "grapharg"):
        copied.meta.pop(key, None)
    return copied
