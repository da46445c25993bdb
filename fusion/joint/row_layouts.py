"""Lays out tensors that are normalised by rows with contiguous rows.

A convolution gives channels first. What is added to its transposed result lies as that does, in eager too, and so does
the residual stream of a whole transformer behind it: each norm reads across memory, where eager's makes a copy first,
and each product writes across it.  Where that pays, the first of these tensors is written with contiguous rows, and
what is made of it follows.

Input: a functional graph, joint or for inference; it is changed in place and returns tensors of the strides it returned
before.  Left as they are: tensors of symbolic sizes, and those that something must read as they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import fx

from fusion.codegen.target import Layouts
from fusion.joint.layout_plans import Plan, Refused, Strides, bytes_of, is_generated, is_known, takes_any_strides

aten = torch.ops.aten

NORMS = {
    aten.native_layer_norm.default: 1,
    aten.native_layer_norm_backward.default: 2,
    aten._fused_rms_norm.default: 1,
    aten._fused_rms_norm_backward.default: 2,
}
"""Norm → how many operands it reads by rows; the shape of a row is its next argument."""
MEANS = frozenset({aten.mean.dim, aten.var.correction, aten.var_mean.correction})
"""What norms that are written out read rows by; dimensions are the second argument."""


def prefer_rows(graph: fx.GraphModule, layouts: Layouts) -> bool:
    """Writes what is normalized with contiguous rows, where that pays; returns whether it was done."""
    tried, done = set[fx.Node](), False
    for norm in list(graph.graph.nodes):
        for start in map(_start, _across(norm, lambda node: node.meta.get("val"))):
            if start not in tried and _may_move(start):
                tried.add(start)
                done |= _move(graph, start, layouts)
    return done


def _move(graph: fx.GraphModule, start: fx.Node, layouts: Layouts) -> bool:
    """Let all readers of `start` read it contiguous, if that pays; was it done?"""
    plan = Plan(partial(_wanted, start), layouts.begins)
    try:
        plan.walk(graph.graph)
    except Refused:
        return False
    before = sum(_crossed(node, lambda arg: arg.meta.get("val")) for node in graph.graph.nodes)
    after = sum(_crossed(node, partial(plan.read_by, node)) for node in graph.graph.nodes)
    if before - after <= plan.cost():
        return False
    plan.apply(graph)
    return True


def _wanted(start: fx.Node, plan: Plan, node: fx.Node) -> dict[fx.Node, Strides]:
    """Contiguous, for those that read `start`."""
    if start not in node.all_input_nodes or not takes_any_strides(node):
        return {}
    return {start: torch.empty(start.meta["val"].shape, device="meta").stride()}


def _start(node: fx.Node) -> fx.Node:
    """The first of the tensors that `node` is made of, one of each."""
    while _is_pointwise(node) and len(node.all_input_nodes) == 1:
        (arg,) = node.all_input_nodes
        if arg.meta["val"].shape != node.meta["val"].shape or not is_generated(arg):
            break
        node = arg
    return node


def _may_move(node: fx.Node) -> bool:
    """Is this a tensor of known strides that a kernel writes, in what order it likes?"""
    return is_generated(node) and isinstance(node.meta.get("val"), torch.Tensor) and is_known(node.meta["val"])


def _crossed(node: fx.Node, value: Callable[[fx.Node], object]) -> int:
    """Bytes that `node` reads across memory; `value`: what its operands, and itself, are."""
    if not _is_pointwise(node):
        return sum(bytes_of(arg.meta["val"]) for arg in _across(node, value))
    made = value(node)
    read = [tensor for arg in node.all_input_nodes if isinstance(tensor := value(arg), torch.Tensor)]
    if not isinstance(made, torch.Tensor) or not all(map(is_known, (made, *read))):
        return 0
    return sum(bytes_of(each) for each in read if each.shape == made.shape and _fastest(each) != _fastest(made))


def _across(node: fx.Node, value: Callable[[fx.Node], object]) -> Iterator[fx.Node]:
    """The operands of a norm whose rows are not contiguous."""
    for arg, rows in _rows(node):
        tensor = value(arg)
        if isinstance(tensor, torch.Tensor) and is_known(tensor):
            fastest = _fastest(tensor)
            if fastest is not None and fastest < tensor.ndim - rows:
                yield arg


def _rows(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """The operands of a norm, each with how many of its last dimensions are a row."""
    if node.target in NORMS:
        count = NORMS[node.target]
        rows = len(cast("Sequence[object]", node.args[count]))
        yield from ((arg, rows) for arg in node.args[:count] if isinstance(arg, fx.Node))
    elif node.target in MEANS and len(node.args) > 1 and isinstance(node.args[1], (list, tuple)):
        arg, dims = cast("tuple[fx.Node, Sequence[int]]", node.args[:2])
        rank = arg.meta["val"].ndim
        if rank and sorted(dim % rank for dim in dims) == [*range(rank - len(dims), rank)]:
            yield arg, len(dims)


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is aten._to_copy.default


def _fastest(tensor: torch.Tensor) -> int | None:
    """The dimension along which neighbours in memory lie; None if there is no other than of one element."""
    dims = [dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1]
    return min(dims, key=lambda dim: (tensor.stride(dim), -dim), default=None)
