"""Inlines regions marked with `nested_compile_region`: each call becomes the operations of its body.

    y = invoke_subgraph(body, x, w)      becomes      y = gelu(linear(x, w))

The mark asks that what is called often be compiled once.  Equal kernels are built once in any case, and nothing can be
fused with a call.  Input: Dynamo's graph, with the graphs that it calls; it is changed in place.

A call stays where its region has options of its own, its operands differ from those that the body was traced with, or
sizes of the body depend on data: each call has others then.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import cast

import torch
from torch import fx
from torch.fx.node import Argument

INVOKE = torch.ops.higher_order.invoke_subgraph


def inline_regions(graph: fx.GraphModule) -> None:
    """Replace the calls of marked regions, also in regions and in other graphs that `graph` calls."""
    for _, part in graph.named_children():
        if isinstance(part, fx.GraphModule):
            inline_regions(part)
    changed = False
    for call in graph.graph.find_nodes(op="call_function", target=INVOKE):
        named = call.args[0]
        body = getattr(graph, str(named.target))
        if not _can_inline(call, body):
            continue
        _inline(graph, call, body)
        changed = True
        if not named.users:
            graph.graph.erase_node(named)
        if not any(node.target == named.target for node in graph.graph.find_nodes(op="get_attr")):
            graph.delete_submodule(str(named.target))
    if changed:
        graph.recompile()


def _can_inline(call: fx.Node, body: fx.GraphModule) -> bool:
    """Are results read one by one, and does the body hold for the operands of this call?"""
    given = _operands(call, body)
    return (
        not body.meta.get("nested_region_config")
        and all(isinstance(given.get(result, result), fx.Node) for result in _results(body))
        and all(user.target is operator.getitem for user in call.users)
        and all(_alike(node, operand) for node, operand in given.items())
        and not any("unbacked_bindings" in node.meta for node in body.graph.nodes)
    )


def _operands(call: fx.Node, body: fx.GraphModule) -> dict[fx.Node, Argument]:
    return dict(zip(body.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))


def _results(body: fx.GraphModule) -> list[fx.Node]:
    return list(cast("Sequence[fx.Node]", body.graph.output_node().args[0]))


def _alike(node: fx.Node, operand: Argument) -> bool:
    """Was the body traced with what is given?"""
    traced = node.meta.get("example_value")
    given = operand.meta.get("example_value") if isinstance(operand, fx.Node) else operand
    if not isinstance(traced, torch.Tensor):
        return str(traced) == str(given)
    if not isinstance(given, torch.Tensor) or traced.layout is not given.layout:
        return False
    same = str(traced.shape) == str(given.shape) and traced.dtype is given.dtype and traced.device == given.device
    return same and (traced.layout is not torch.strided or str(traced.stride()) == str(given.stride()))


def _inline(graph: fx.GraphModule, call: fx.Node, body: fx.GraphModule) -> None:
    given = _operands(call, body)
    with graph.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            given[node] = copied = graph.graph.node_copy(node, given.__getitem__)
            if node.op == "get_attr":
                copied.target = _moved(graph, body, str(node.target))
    results = _results(body)
    for reader in list(call.users):
        read = given[results[cast(int, reader.args[1])]]
        reader.replace_all_uses_with(cast(fx.Node, read))
        graph.graph.erase_node(reader)
    graph.graph.erase_node(call)


def _moved(graph: fx.GraphModule, body: fx.GraphModule, name: str) -> str:
    """What `body` calls `name`, as `graph` then calls it."""
    value = operator.attrgetter(name)(body)
    known = dict(graph.named_children())
    found = next((key for key, part in known.items() if part is value), None)
    if found is not None:
        return found
    count = 0
    while hasattr(graph, fresh := f"{name.replace('.', '_')}_{count}"):
        count += 1
    setattr(graph, fresh, value)
    return fresh
