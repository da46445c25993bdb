"""Layout: gradients are made in the memory layout of what they are gradients of.

Autograd keeps the gradient of a leaf in the leaf's own strides: given other ones, it copies.  Written by the kernel
that makes the gradient, the layout costs nothing.  (A gradient that arrives at a graph in front of this one is brought
into the layout of that graph's result in the same way.)

Input: the joint graph, with its number of forward results; it is changed in place.  Left as they are: what has its
place already, symbolic strides, and tensors with gaps or overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from fusion.joint.writing import write

aten = torch.ops.aten


def lay_out_gradients(joint: fx.GraphModule, results: int) -> None:
    """Give every gradient the strides of its input; `results` are those of forward, gradients follow them."""
    output = joint.graph.output_node()
    returned = list(cast("Sequence[fx.Node | None]", output.args[0]))
    inputs = [node for node in joint.graph.nodes if node.op == "placeholder"]
    if len(returned) - results > len(inputs):
        return
    for place, given in zip(range(results, len(returned)), inputs, strict=False):
        gradient = returned[place]
        if isinstance(gradient, fx.Node) and _differs(gradient, given):
            with joint.graph.inserting_before(output):
                returned[place] = with_strides(gradient, given.meta["val"].stride())
    output.args = (tuple(returned),)
    joint.graph.lint()
    joint.recompile()


def _differs(gradient: fx.Node, given: fx.Node) -> bool:
    """Are both tensors of known, dense strides that are not the same?"""
    made, wanted = gradient.meta.get("val"), given.meta.get("val")
    if not isinstance(made, torch.Tensor) or not isinstance(wanted, torch.Tensor) or made.layout is not torch.strided:
        return False
    numbers = (*made.shape, *wanted.shape, *made.stride(), *wanted.stride())
    if not all(isinstance(number, int) for number in numbers) or made.shape != wanted.shape or made.numel() == 0:
        return False
    apart = any(a != b for a, b, size in zip(made.stride(), wanted.stride(), made.shape, strict=True) if size > 1)
    return apart and is_dense(wanted)


def is_dense(tensor: torch.Tensor) -> bool:
    """Does a tensor lie in memory without gaps or overlaps?"""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def with_strides(node: fx.Node, strides: Sequence[int]) -> fx.Node:
    """A copy with these strides, of a dense tensor: its dimensions in the order of these, contiguous, and put back."""
    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(len(order)), key=order.__getitem__)
    moved = order != sorted(order)
    node = write(node, aten.permute.default, node, order) if moved else node
    node = write(node, aten.clone.default, node, memory_format=torch.contiguous_format)
    return write(node, aten.permute.default, node, back) if moved else node
