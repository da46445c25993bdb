"""Copies: the operands of tiles, which generated kernels read where they lie.

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

from fusion.joint.factors import PERMUTATIONS, PRODUCTS, VIEWS, value_of
from lowering.sizes import elements

aten = torch.ops.aten


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
            if user.target not in (*VIEWS, *PERMUTATIONS):
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
