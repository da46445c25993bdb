"""Recomputation: marks nodes for backward to recompute rather than forward to save.

Input: a joint graph before its min-cut partition; nodes are marked with PyTorch's own checkpoint policy, which the
partition follows.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusion.joint.copies import copies_for_products
from fusion.joint.factors import is_product
from fusion.joint.large_products import grows, short
from fusion.joint.saved_inputs import views_of_inputs
from fusion.lowering.sizes import elements, size_of


def prefer_views_of_inputs(joint: fx.GraphModule) -> None:
    """Mark views of inputs: saving them would keep data that the input holds already.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> show_graph(prefer_views_of_inputs, lambda x, y: x.t().sin() * y, empty(3, 4), empty(4, 3))
    - t = t(x)
    + t = t(x)   # recompute
      sin = sin(t)
      mul = mul.Tensor(sin, y)
      return mul
    """
    for view in views_of_inputs(joint):
        _prefer(view)


def prefer_recomputed_products(joint: fx.GraphModule) -> None:
    """Mark nodes that backward should recompute: large products, maps of them, copies that only such products read, and
    nodes without operands (masks).

    A product is large if it is larger than its operands.  Nodes that must be saved stay so.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> show_graph(prefer_recomputed_products, lambda x, y: (x @ y).sin().sum(), empty(90, 4), empty(4, 90))
    - mm = mm(x, y)
    - sin = sin(mm)
    + mm = mm(x, y)   # recompute
    + sin = sin(mm)   # recompute
      sum_1 = sum(sin)
      return sum_1
    """
    constant: set[fx.Node] = set()
    tiles: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if isinstance(node.meta.get("val"), torch.SymInt):
            constant.add(node)  # sizes are available in any case
            continue
        if node.op != "call_function" or _is_random(node):
            continue
        if all(arg in constant for arg in node.all_input_nodes):
            constant.add(node)
        elif _grows(node) or (_is_map_of(node, tiles) and not is_product(node)):
            tiles.add(node)
        else:
            continue
        _prefer(node)
    for copy in copies_for_products(joint, tiles):
        _prefer(copy)


def _prefer(node: fx.Node) -> None:
    if not any(user.op == "output" for user in node.users):
        node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_map_of(node: fx.Node, tiles: Collection[fx.Node]) -> bool:
    """Return whether this is an operation on a tile with a result of at least its size."""
    result = node.meta.get("val")
    tile_operands = [arg.meta["val"] for arg in node.all_input_nodes if arg in tiles]
    return isinstance(result, torch.Tensor) and any(
        elements(result.shape) >= elements(val.shape) for val in tile_operands
    )


def _grows(node: fx.Node) -> bool:
    """Return whether this is a product over a short static axis, larger than its operands together."""
    return is_product(node) and size_of(short(node)).is_Integer and grows(node)
