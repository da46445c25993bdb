"""Copies: those of which nobody can tell that they are none, and operands of tiles, read where they lie.

What is copied as it lies, by a program or by the trace of an operation, a partition would save beside what it is a copy
of, and forward write both.

Queries, keys and values are views of what a linear layer made, with heads before positions; eager copies them for its
products, and a partition would save each copy.  Kernels that walk tiles read through copies, whatever their strides.
So backward may make them again, which costs nothing there, and what is saved is what they are copies of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from operator import getitem

import torch
from torch import fx

from fusion.joint.factors import PRODUCTS, value_of
from fusion.joint.facts import is_rearranged, memories
from fusion.lowering.sizes import elements, size_of

aten = torch.ops.aten


def drop_copies(joint: fx.GraphModule) -> None:
    """Read what was computed itself instead of copies of it that lie alike: nothing in the graph writes to either.

    Whoever is given a copy may write to it, as may whoever gave an argument; these copies stay.
    """
    for copy in joint.graph.find_nodes(op="call_function", target=aten.clone.default):
        source = copy.all_input_nodes[0]
        lies_alike = [size_of(s) for s in value_of(source).stride()] == [size_of(s) for s in value_of(copy).stride()]
        if lies_alike and _is_computed(source) and not any(_is_returned(node) for node in (source, copy)):
            copy.replace_all_uses_with(source)
            joint.graph.erase_node(copy)
    joint.recompile()


def _is_computed(node: fx.Node) -> bool:
    """Is this a tensor of its own that the graph makes?"""
    made = node.all_input_nodes[0] if node.target is getitem else node
    return made.op == "call_function" and not _shares_memory(made)


def _is_returned(node: fx.Node) -> bool:
    """Does the graph return this, or a view of it?"""
    return any(user.op == "output" or (_shares_memory(user) and _is_returned(user)) for user in node.users)


def _shares_memory(node: fx.Node) -> bool:
    """May results of this operation lie in the memory of what it is given?"""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    taken = {memory for arg in node.all_input_nodes for memory in memories(arg)}
    declared = any(result.alias_info is not None for result in node.target._schema.returns)
    return declared or not taken.isdisjoint(memories(node))


def copies_for_products(joint: fx.GraphModule, tiles: Collection[fx.Node]) -> list[fx.Node]:
    """The copies, and views of them, that only products with `tiles` read, and that are together as large as what they
    are copies of: that is what would be saved in their place.
    """
    found: dict[fx.Node, list[list[fx.Node]]] = defaultdict(list)
    for copy in joint.graph.find_nodes(op="call_function", target=aten.clone.default):
        made = _read_by_products(copy, tiles)
        if made:
            found[_source(copy)].append(made)
    return [
        node
        for source, copies in found.items()
        if source.op == "placeholder"
        or sum(elements(value_of(made[0]).shape) for made in copies) >= elements(value_of(source).shape)
        for made in copies
        for node in made
    ]


def _read_by_products(copy: fx.Node, tiles: Collection[fx.Node]) -> list[fx.Node]:
    """A copy and all views of it, if products that make or take tiles are all that reads them; else nothing."""
    made = {copy: None}
    todo = [copy]
    while todo:
        for user in todo.pop().users:
            if user.target in PRODUCTS and (user in tiles or any(arg in tiles for arg in user.all_input_nodes)):
                continue
            if not is_rearranged(user):
                return []
            if user not in made:
                made[user] = None
                todo.append(user)
    return list(made)


def _source(copy: fx.Node) -> fx.Node:
    """What has memory of its own, of which a copy is a copy of a view."""
    node = copy.all_input_nodes[0]
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    return _is_view(node.all_input_nodes[0]) if node.target is getitem else getattr(node.target, "is_view", False)
