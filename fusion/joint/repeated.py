"""What a graph computes twice, once: an operation is the earlier one of the same operands.

AOTAutograd's partition does this by a function that imports all of inductor, 0.5 s at the first graph.  Input: a joint
graph, which is changed in place.  What may not be one value stays two: random numbers, memory that nothing was written
to, results that share memory with what is returned, and what is made before and after something is changed.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping

import torch
from torch import fx
from torch._ops import OpOverload

_OWN = frozenset({"aten", "prims"})
"""Namespaces of operations that do nothing but what their schemas say."""


def merge_repeated(joint: fx.GraphModule) -> None:
    """Have each value made once."""
    returned = {memory for node in joint.graph.output_node().all_input_nodes for memory in _memory(node)}
    made: dict[Hashable, fx.Node] = {}
    changes = 0
    for node in list(joint.graph.nodes):
        changes += _changes(node)
        if not _may_be_shared(node) or not returned.isdisjoint(_memory(node)):
            continue
        try:
            first = made.setdefault((changes, node.target, _said(node.args), _said(node.kwargs)), node)
        except TypeError:  # a size that is not known does not compare
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            joint.graph.erase_node(node)
    joint.recompile()


def _changes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _may_be_shared(node: fx.Node) -> bool:
    if node.op != "call_function" or "unbacked_bindings" in node.meta:
        return False
    if not isinstance(node.target, OpOverload):
        return getattr(operator, getattr(node.target, "__name__", ""), None) is node.target
    random = torch.Tag.nondeterministic_seeded in node.target.tags
    empty = "empty" in node.target._schema.name
    return node.target.namespace in _OWN and not (random or empty or _changes(node))


def _memory(node: fx.Node) -> Iterator[int]:
    """The memory of what a node gives, as far as it has any."""
    val = node.meta.get("val")
    for part in val if isinstance(val, (list, tuple)) else (val,):
        if isinstance(part, torch.Tensor) and part.layout is torch.strided:
            yield part.untyped_storage()._cdata


def _said(arg: object) -> Hashable:
    """Arguments as what is equal only if it means the same: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(arg, fx.Node):
        return arg
    if isinstance(arg, (list, tuple)):
        return ("sequence", *map(_said, arg))
    if isinstance(arg, Mapping):
        return ("mapping", frozenset((key, _said(value)) for key, value in arg.items()))
    if isinstance(arg, slice):
        return ("slice", _said(arg.start), _said(arg.stop), _said(arg.step))
    if isinstance(arg, complex):
        return ("complex", arg.real.hex(), arg.imag.hex())
    return (type(arg), arg.hex() if isinstance(arg, float) else arg)
