"""Removes copies with the layout of their source, and reads operands of tiles through copies.

A partition would save a copy of a tensor in the same layout, from a program or from the trace of an operation, beside
its source, and forward would write both.

Queries, keys and values are views of the result of a linear layer, with heads before positions; eager copies them for
its products, and a partition would save each copy.  Kernels that loop over tiles read through copies, whatever their
strides.  So backward may recompute them, which costs nothing there, and their sources are saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from operator import getitem

import torch
from torch import fx

from fusion.joint.factors import is_product, value_of
from fusion.joint.facts import is_rearranged, memories
from fusion.lowering.ir.sizes import elements, size_of

aten = torch.ops.aten


def drop_copies(joint: fx.GraphModule) -> None:
    """Replace copies by their sources if both have the same layout and the graph writes to neither.

    The recipient of a copy may write to it, as may the owner of an argument; these copies stay.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> show_graph(drop_copies, lambda x: x.sin().clone() * 2, empty(3))
      sin = sin(x)
    - clone = clone(sin)
    - mul = mul.Tensor(clone, 2)
    + mul = mul.Tensor(sin, 2)
      return mul
    """
    for copy in joint.graph.find_nodes(op="call_function", target=aten.clone.default):
        source = copy.all_input_nodes[0]
        same_strides = [size_of(s) for s in value_of(source).stride()] == [size_of(s) for s in value_of(copy).stride()]
        if same_strides and _is_computed(source) and not any(_is_returned(node) for node in (source, copy)):
            copy.replace_all_uses_with(source)
            joint.graph.erase_node(copy)
    joint.recompile()


def _is_computed(node: fx.Node) -> bool:
    """Return whether this is a tensor in memory of its own that the graph computes."""
    call = node.all_input_nodes[0] if node.target is getitem else node
    return call.op == "call_function" and not _shares_memory(call)


def _is_returned(node: fx.Node) -> bool:
    """Return whether the graph returns this, or a view of it."""
    return any(user.op == "output" or (_shares_memory(user) and _is_returned(user)) for user in node.users)


def _shares_memory(node: fx.Node) -> bool:
    """Return whether results of this operation may share the memory of its operands."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    taken = {memory for arg in node.all_input_nodes for memory in memories(arg)}
    declared = any(result.alias_info is not None for result in node.target._schema.returns)
    return declared or not taken.isdisjoint(memories(node))


def copies_for_products(joint: fx.GraphModule, tiles: Collection[fx.Node]) -> list[fx.Node]:
    """Return the copies, with their views, that only products with `tiles` read, and that are together at least as
    large as their sources: the sources are then saved instead.
    """
    copies_of: dict[fx.Node, list[list[fx.Node]]] = defaultdict(list)
    for copy in joint.graph.find_nodes(op="call_function", target=aten.clone.default):
        views = _read_by_products(copy, tiles)
        if views:
            copies_of[_source(copy)].append(views)
    return [
        node
        for source, copies in copies_of.items()
        if source.op == "placeholder"
        or sum(elements(value_of(views[0]).shape) for views in copies) >= elements(value_of(source).shape)
        for views in copies
        for node in views
    ]


def _read_by_products(copy: fx.Node, tiles: Collection[fx.Node]) -> list[fx.Node]:
    """Return a copy and all views of it, if only products that compute or read tiles read them; else nothing."""
    views = {copy: None}
    todo = [copy]
    while todo:
        for user in todo.pop().users:
            if is_product(user) and (user in tiles or any(arg in tiles for arg in user.all_input_nodes)):
                continue
            if not is_rearranged(user):
                return []
            if user not in views:
                views[user] = None
                todo.append(user)
    return list(views)


def _source(copy: fx.Node) -> fx.Node:
    """Return the base of the view that a copy copies."""
    node = copy.all_input_nodes[0]
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    return _is_view(node.all_input_nodes[0]) if node.target is getitem else getattr(node.target, "is_view", False)
