"""Merges repeated operations of a graph (common-subexpression elimination).

AOTAutograd's partition does this by a function that imports all of inductor, 0.5 s at the first graph.  Input: a joint
graph, which is changed in place.  Not merged: random numbers, uninitialised memory, results that share memory with a
returned tensor, and calls before and after a mutation.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping

import torch
from torch import fx
from torch._ops import OpOverload

_OWN = frozenset({"aten", "prims"})
"""Namespaces of operations that do exactly what their schemas say."""


def eliminate_common_subexpressions(joint: fx.GraphModule) -> None:
    """Compute each value once.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> show_graph(eliminate_common_subexpressions, lambda x: x.exp() * (x.exp() + 1), empty(3))
      exp = exp(x)
    - exp_1 = exp(x)
    - add = add.Tensor(exp_1, 1)
    + add = add.Tensor(exp, 1)
      mul = mul.Tensor(exp, add)
      return mul
    """
    returned = {memory for node in joint.graph.output_node().all_input_nodes for memory in _memory(node)}
    seen: dict[Hashable, fx.Node] = {}
    changes = 0
    for node in list(joint.graph.nodes):
        changes += _changes(node)
        if not _may_be_shared(node) or not returned.isdisjoint(_memory(node)):
            continue
        try:
            first = seen.setdefault((changes, node.target, _canonical(node.args), _canonical(node.kwargs)), node)
        except TypeError:  # an unbacked size does not compare
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
    """Yield the storages of a node's results."""
    val = node.meta.get("val")
    for part in val if isinstance(val, (list, tuple)) else (val,):
        if isinstance(part, torch.Tensor) and part.layout is torch.strided:
            yield part.untyped_storage()._cdata


def _canonical(arg: object) -> Hashable:
    """Return arguments in a form that is equal only for equal meaning: 1, 1.0 and True differ, as do 0.0 and -0.0."""
    if isinstance(arg, fx.Node):
        return arg
    if isinstance(arg, (list, tuple)):
        return ("sequence", *map(_canonical, arg))
    if isinstance(arg, Mapping):
        return ("mapping", frozenset((key, _canonical(value)) for key, value in arg.items()))
    if isinstance(arg, slice):
        return ("slice", _canonical(arg.start), _canonical(arg.stop), _canonical(arg.step))
    if isinstance(arg, complex):
        return ("complex", arg.real.hex(), arg.imag.hex())
    return (type(arg), arg.hex() if isinstance(arg, float) else arg)
