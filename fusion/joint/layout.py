"""Computes gradients in the memory layout of their inputs.

Autograd keeps the gradient of a leaf in the leaf's own strides: it copies one with other strides.  Written by the
kernel that computes the gradient, the layout costs nothing.  (A gradient that is passed to the graph before this one is
laid out like that graph's result in the same way.)

Input: the joint graph, with its number of forward results; it is changed in place.  Unchanged: gradients that have the
right strides, symbolic strides, and tensors with gaps or overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from fusion.joint.writing import write

aten = torch.ops.aten


def lay_out_gradients(joint: fx.GraphModule, results: int) -> None:
    """Give every gradient the strides of its input; `results` is the number of forward results before the gradients.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> def f(x):
    ...     return x.sum(), x.cos().t().contiguous().t()
    >>> show_graph(lambda graph: lay_out_gradients(graph, 1), f, empty(2, 3), layouts=True)
      sum_1: f32[] = sum(x)
      cos: f32[2, 3] = cos(x)
      t: f32[3, 2] strides (1, 3) = t(cos)
      clone: f32[3, 2] = clone(t, memory_format=torch.contiguous_format)
      t_1: f32[2, 3] strides (1, 2) = t(clone)
    + clone_1: f32[2, 3] = clone(t_1, memory_format=torch.contiguous_format)
    - return sum_1, t_1
    + return sum_1, clone_1
    """
    output = joint.graph.output_node()
    returned = list(cast("Sequence[fx.Node | None]", output.args[0]))
    inputs = [node for node in joint.graph.nodes if node.op == "placeholder"]
    if len(returned) - results > len(inputs):
        return
    for position, holder in zip(range(results, len(returned)), inputs, strict=False):
        gradient = returned[position]
        if isinstance(gradient, fx.Node) and _differs(gradient, holder):
            with joint.graph.inserting_before(output):
                returned[position] = with_strides(gradient, holder.meta["val"].stride())
    output.args = (tuple(returned),)
    joint.graph.lint()
    joint.recompile()


def _differs(gradient: fx.Node, holder: fx.Node) -> bool:
    """Return whether both tensors have static, dense strides that differ."""
    actual, wanted = gradient.meta.get("val"), holder.meta.get("val")
    if (
        not isinstance(actual, torch.Tensor)
        or not isinstance(wanted, torch.Tensor)
        or actual.layout is not torch.strided
    ):
        return False
    numbers = (*actual.shape, *wanted.shape, *actual.stride(), *wanted.stride())
    if not all(isinstance(number, int) for number in numbers) or actual.shape != wanted.shape or actual.numel() == 0:
        return False
    differ = any(a != b for a, b, size in zip(actual.stride(), wanted.stride(), actual.shape, strict=True) if size > 1)
    return differ and is_dense(wanted)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is stored without gaps or overlaps."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def coincide(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Return whether a dense tensor with these strides would have every element where it is.

    >>> coincide(torch.empty(4, 3, 1, 1), (3, 1, 3, 3)), coincide(torch.empty(4, 3, 2, 1), (6, 1, 3, 3))
    (True, False)
    """
    dims = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return is_dense(tensor) and all(size == 1 or before == after for size, before, after in dims)


def with_strides(node: fx.Node, strides: Sequence[int]) -> fx.Node:
    """Copy a dense tensor to these strides: permute, make contiguous, permute back; view it where they coincide."""
    if coincide(node.meta["val"], strides):
        return write(node, aten.as_strided.default, node, list(node.meta["val"].shape), list(strides))
    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(len(order)), key=order.__getitem__)
    permuted = order != sorted(order)
    node = write(node, aten.permute.default, node, order) if permuted else node
    node = write(node, aten.clone.default, node, memory_format=torch.contiguous_format)
    return write(node, aten.permute.default, node, back) if permuted else node
