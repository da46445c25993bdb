"""Marks nodes for backward to recompute rather than forward to save.

Input: a joint graph before its min-cut partition; nodes are marked with PyTorch's own checkpoint policy, which the
partition follows.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusion.joint.copies import copies_for_products
from fusion.joint.dependence import is_tangent
from fusion.joint.factors import is_product, is_tensor, operands, value_of
from fusion.lowering.ir.sizes import elements, hint_of, size_of
from fusion.schedule.chained.candidates import LEAST_SHARE, LEAST_TILE
from fusion.schedule.chained.place_producers import LONGEST_HELD_AXIS


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
    """Return whether this is a product over a short static axis, larger than its operands, that no pass wants saved."""
    kept = node.meta.get("recompute") is CheckpointPolicy.PREFER_SAVE
    return is_product(node) and not kept and size_of(short(node)).is_Integer and grows(node)


def views_of_inputs(joint: fx.GraphModule) -> list[fx.Node]:
    """Return the views with as many elements as their input, and no other operands.

    A partition regards a view as as large as the input, and nearer to backward, and saves it.  Forward would then make
    each view for backward alone, by the operations of the program, and autograd one more of each; an input costs
    neither, and kernels of backward read through views.  (Attention with three inputs: eight calls, an eighth of the
    host's time for both.)

    A part of an input should be saved: the partition counts saved elements, and would count the full input.
    """
    inputs = {node for node in joint.graph.find_nodes(op="placeholder") if not is_tangent(node)}
    views: dict[fx.Node, None] = {}
    for node in joint.graph.nodes:
        if not getattr(node.target, "is_view", False) or len(node.all_input_nodes) != 1:
            continue
        (base,) = node.all_input_nodes
        if (base in inputs or base in views) and _is_as_large(node, base):
            views[node] = None
    return list(views)


def _is_as_large(view: fx.Node, base: fx.Node) -> bool:
    """Return whether a view has as many elements as its base."""
    return is_tensor(view) and is_tensor(base) and elements(value_of(view).shape) == elements(value_of(base).shape)


def grows(product: fx.Node) -> bool:
    """Return whether a product has a short reduced axis, and is larger than its operands, in a batch than half of them.

    Kernels recompute it block by block where they read it: it is not worth saving between forward and backward, which
    has the operands in any case.  The scheduler decides which are recomputed (`schedule/chained/candidates.py`); the
    passes over the joint graph predict it by the same criteria, with sizes as traced.
    """
    size_of_operands = sum(elements(value_of(operand).shape) for operand in operands(product))
    share = LEAST_SHARE if value_of(product).dim() > 2 else 1
    return hint_of(short(product)) <= LONGEST_HELD_AXIS and share * elements(value_of(product).shape) > size_of_operands


def is_tile(product: fx.Node) -> bool:
    """Return whether a product grows, and is too large for the library's result to be stored."""
    return grows(product) and elements(value_of(product).shape) >= LEAST_TILE


def short(product: fx.Node) -> int | torch.SymInt:
    """Return the size of the reduced axis of a product."""
    return value_of(operands(product)[0]).shape[-1]
