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
    """Give every gradient the strides of its input; `results` is the number of forward results before the gradients."""
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
    """Return whether a tensor lies in memory without gaps or overlaps."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def with_strides(node: fx.Node, strides: Sequence[int]) -> fx.Node:
    """Copy a dense tensor to these strides: permute, make contiguous, permute back."""
    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(len(order)), key=order.__getitem__)
    permuted = order != sorted(order)
    node = write(node, aten.permute.default, node, order) if permuted else node
    node = write(node, aten.clone.default, node, memory_format=torch.contiguous_format)
    return write(node, aten.permute.default, node, back) if permuted else node
