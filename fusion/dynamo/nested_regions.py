"""Inlines regions marked with `nested_compile_region`: each call becomes the operations of its body.

    y = invoke_subgraph(body, x, w)      becomes      y = gelu(linear(x, w))

The mark asks to compile a region once that is called often.  Equal kernels are built once in any case, and nothing can
be fused across a call.  Input: Dynamo's graph, with the graphs that it calls; it is changed in place.

A call stays if its region has separate options, if its operands differ from the operands that the body was traced with,
or if sizes of the body are data-dependent: these differ between calls.
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
    """Replace the calls of marked regions, also in regions and in other graphs that `graph` calls.

    >>> from fusion.inspect.examples import show_captured
    >>> from torch import empty
    >>> @torch.compiler.nested_compile_region
    ... def layer(x):
    ...     return x.sin() * 2
    >>> show_captured(inline_regions, lambda x: layer(layer(x)), empty(3))
    - invoke_subgraph = invoke_subgraph(subgraph_0, subgraph_0, l_x_)
    - getitem = getitem(invoke_subgraph, 0)
    - invoke_subgraph_1 = invoke_subgraph(subgraph_1, subgraph_0, getitem)
    - getitem_1 = getitem(invoke_subgraph_1, 0)
    - return getitem_1
    + sin = sin(l_x_)
    + mul = mul(sin, 2)
    + sin_1 = sin(mul)
    + mul_1 = mul(sin_1, 2)
    + return mul_1
    """
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
    """Return whether results are read one by one, and the body is valid for the operands of this call."""
    operands = _operands(call, body)
    return (
        not body.meta.get("nested_region_config")
        and all(isinstance(operands.get(result, result), fx.Node) for result in _results(body))
        and all(user.target is operator.getitem for user in call.users)
        and all(_alike(node, operand) for node, operand in operands.items())
        and not any("unbacked_bindings" in node.meta for node in body.graph.nodes)
    )


def _operands(call: fx.Node, body: fx.GraphModule) -> dict[fx.Node, Argument]:
    return dict(zip(body.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))


def _results(body: fx.GraphModule) -> list[fx.Node]:
    return list(cast("Sequence[fx.Node]", body.graph.output_node().args[0]))


def _alike(node: fx.Node, operand: Argument) -> bool:
    """Return whether the body was traced with an operand like this."""
    traced = node.meta.get("example_value")
    value = operand.meta.get("example_value") if isinstance(operand, fx.Node) else operand
    if not isinstance(traced, torch.Tensor):
        return str(traced) == str(value)
    if not isinstance(value, torch.Tensor) or traced.layout is not value.layout:
        return False
    same = str(traced.shape) == str(value.shape) and traced.dtype is value.dtype and traced.device == value.device
    return same and (traced.layout is not torch.strided or str(traced.stride()) == str(value.stride()))


def _inline(graph: fx.GraphModule, call: fx.Node, body: fx.GraphModule) -> None:
    operands = _operands(call, body)
    with graph.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            operands[node] = copied = graph.graph.node_copy(node, operands.__getitem__)
            if node.op == "get_attr":
                copied.target = _adopted(graph, body, str(node.target))
    results = _results(body)
    for reader in list(call.users):
        read = operands[results[cast(int, reader.args[1])]]
        reader.replace_all_uses_with(cast(fx.Node, read))
        graph.graph.erase_node(reader)
    graph.graph.erase_node(call)


def _adopted(graph: fx.GraphModule, body: fx.GraphModule, name: str) -> str:
    """Return the name in `graph` of an attribute `name` of `body`, which is added if need be."""
    value = operator.attrgetter(name)(body)
    known = dict(graph.named_children())
    existing = next((key for key, part in known.items() if part is value), None)
    if existing is not None:
        return existing
    count = 0
    while hasattr(graph, fresh := f"{name.replace('.', '_')}_{count}"):
        count += 1
    setattr(graph, fresh, value)
    return fresh
