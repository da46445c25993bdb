"""Lays out tensors that are normalised by rows with contiguous rows.

A convolution returns channels first.  A sum with its transposed result has the same layout, in eager too, and so does
the residual stream of a whole transformer behind it: each norm reads across memory, where eager's makes a copy first,
and each product writes across it.  Where that pays off, the first of these tensors is written with contiguous rows, and
its consumers follow.  The operands of convolutions keep the layout that `channels_last` chose for them, by copies.

Input: a functional graph, joint or for inference; it is changed in place and returns tensors of the strides it returned
before.  Unchanged: tensors of symbolic sizes, and tensors that some reader needs in their layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import fx

from fusion.codegen.target import Layouts
from fusion.joint.facts import averaged
from fusion.joint.layout_plans import (
    CONVOLUTIONS,
    LayoutPlan,
    NoLayout,
    Strides,
    bytes_of,
    is_generated,
    is_known,
    takes_any_strides,
)

aten = torch.ops.aten


def prefer_rows(graph: fx.GraphModule, layouts: Layouts) -> bool:
    """Write normalised tensors with contiguous rows, where that pays off; return whether it was done.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty, layer_norm
    >>> show_graph(
    ...     lambda graph: prefer_rows(graph, Layouts(0.0, (0.0, 0.0))),
    ...     lambda x: layer_norm(y := x.transpose(1, 2).sin(), [64]) + layer_norm(y.cos(), [64]),
    ...     empty(2, 64, 500),
    ...     layouts=True,
    ... )
      transpose: f32[2, 500, 64] strides (32000, 1, 500) = transpose.int(x, 1, 2)
      sin: f32[2, 500, 64] strides (32000, 1, 500) = sin(transpose)
    + clone: f32[2, 500, 64] = clone(sin, memory_format=torch.contiguous_format)
    - native_layer_norm = native_layer_norm(sin, [64], None, None, 1e-05)
    + native_layer_norm = native_layer_norm(clone, [64], None, None, 1e-05)
      getitem: f32[2, 500, 64] = getitem(native_layer_norm, 0)
      getitem_1: f32[2, 500, 1] = getitem(native_layer_norm, 1)
      getitem_2: f32[2, 500, 1] = getitem(native_layer_norm, 2)
    - cos: f32[2, 500, 64] strides (32000, 1, 500) = cos(sin)
    + cos: f32[2, 500, 64] = cos(clone)
      native_layer_norm_1 = native_layer_norm(cos, [64], None, None, 1e-05)
      getitem_3: f32[2, 500, 64] = getitem(native_layer_norm_1, 0)
      getitem_4: f32[2, 500, 1] = getitem(native_layer_norm_1, 1)
      getitem_5: f32[2, 500, 1] = getitem(native_layer_norm_1, 2)
      add: f32[2, 500, 64] = add.Tensor(getitem, getitem_3)
      return add
    """
    tried, done = set[fx.Node](), False
    for norm in list(graph.graph.nodes):
        for start in map(_start, _across(norm, lambda node: node.meta.get("val"))):
            if start not in tried and _may_move(start):
                tried.add(start)
                done |= _move(graph, start, layouts)
    return done


def _move(graph: fx.GraphModule, start: fx.Node, layouts: Layouts) -> bool:
    """Let all readers of `start` read it contiguous, if that pays off; return whether it does."""
    plan = LayoutPlan(partial(_wanted, start), layouts.begins, lambda node: node.target in CONVOLUTIONS)
    try:
        plan.propagate(graph.graph)
    except NoLayout:
        return False
    before = sum(_crossed(node, lambda arg: arg.meta.get("val")) for node in graph.graph.nodes)
    after = sum(_crossed(node, partial(plan.read_by, node)) for node in graph.graph.nodes)
    if before - after <= plan.cost():
        return False
    plan.apply(graph)
    return True


def _wanted(start: fx.Node, plan: LayoutPlan, node: fx.Node) -> dict[fx.Node, Strides]:
    """Return contiguous strides for the readers of `start`."""
    if start not in node.all_input_nodes or not takes_any_strides(node):
        return {}
    return {start: torch.empty(start.meta["val"].shape, device="meta").stride()}


def _start(node: fx.Node) -> fx.Node:
    """Return the first of the chain of one-operand pointwise nodes that leads to `node`."""
    while _is_pointwise(node) and len(node.all_input_nodes) == 1:
        (arg,) = node.all_input_nodes
        if arg.meta["val"].shape != node.meta["val"].shape or not is_generated(arg):
            break
        node = arg
    return node


def _may_move(node: fx.Node) -> bool:
    """Return whether a generated kernel writes this tensor, of static strides, and so in any order of dimensions."""
    return is_generated(node) and isinstance(node.meta.get("val"), torch.Tensor) and is_known(node.meta["val"])


def _crossed(node: fx.Node, value: Callable[[fx.Node], object]) -> int:
    """Return the bytes that `node` reads across memory; `value` returns the fake tensor of a node."""
    if not _is_pointwise(node):
        return sum(bytes_of(arg.meta["val"]) for arg in _across(node, value))
    result = value(node)
    read = [tensor for arg in node.all_input_nodes if isinstance(tensor := value(arg), torch.Tensor)]
    if not isinstance(result, torch.Tensor) or not all(map(is_known, (result, *read))):
        return 0
    return sum(bytes_of(each) for each in read if each.shape == result.shape and _fastest(each) != _fastest(result))


def _across(node: fx.Node, value: Callable[[fx.Node], object]) -> Iterator[fx.Node]:
    """Yield the operands of a norm, or of a mean, whose rows are not contiguous."""
    if getattr(node.target, "is_view", False) or _is_pointwise(node):
        return
    tensors = {arg: value(arg) for arg in node.all_input_nodes}
    fastest = {arg: _fastest(x) for arg, x in tensors.items() if isinstance(x, torch.Tensor) and is_known(x)}
    if not any(dim is not None and dim < arg.meta["val"].ndim - 1 for arg, dim in fastest.items()):
        return  # before the call is lowered: rows are contiguous in most graphs
    for arg, rows in averaged(node):
        dim = fastest.get(arg)
        if dim is not None and dim < arg.meta["val"].ndim - rows:
            yield arg


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is aten._to_copy.default


def _fastest(tensor: torch.Tensor) -> int | None:
    """Return the dimension with the smallest stride; None if no dimension has two elements."""
    dims = [dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1]
    return min(dims, key=lambda dim: (tensor.stride(dim), -dim), default=None)
