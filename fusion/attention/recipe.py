"""Copies the operations that compute a mask out of Dynamo's graph, and reads the values in it.

Input: nodes of Dynamo's graph, whose values are fake tensors; output: a `Recipe`: a small separate graph, over copies
of the tensors without data, with numbers for sizes.
"""

from __future__ import annotations

import math
from collections.abc import Container

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

from fusion.dynamo.writes import memory_of, written_memories
from fusion.lowering.errors import Unsupported

LONGEST_RECIPE = 64
"""The most operations of a mask that are copied."""


class Recipe:
    """A graph under construction: its inputs, and the operations of a mask, back to smaller tensors and to constants.

    Attributes:
        graph: the copied operations.
        values: the inputs in order, without data.
        exact: whether it computes the same whatever the sizes of the program are: none that it uses is symbolic.
    """

    def __init__(self, mode: FakeTensorMode, autocast: torch.dtype | None) -> None:
        self.mode, self.autocast, self.exact = mode, autocast, True
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Tensor] = {}  # of the inputs, in order
        self.copies: dict[fx.Node, fx.Node] = {}

    def input(self, node: object) -> fx.Node:
        """Make a tensor of the program an input."""
        if not isinstance(node, fx.Node):
            raise Unsupported("an argument is not a tensor")
        if node not in self.copies:
            self.copies[node] = self.graph.placeholder(f"in{len(self.values)}")
            self.values[self.copies[node]] = without_data(tensor_of(node), self.mode, self.autocast)
        return self.copies[node]

    def copy(self, mask: object) -> fx.Node:
        """Copy the operations that compute the mask, if they can be followed; else make the mask an input."""
        if not isinstance(mask, fx.Node):
            raise Unsupported("the mask is not a tensor")
        needed = _made_of(mask, math.prod(map(number, tensor_of(mask).shape[-2:])))
        if needed is None:
            return self.input(mask)
        self.exact = self.exact and not any(_is_symbolic(value_of(node)) for node in needed)
        for node in needed:
            if node in self.copies:
                continue
            if isinstance(value_of(node), Tensor) and not _is_copied(node, needed[node]):
                self.input(node)
            elif isinstance(value_of(node), Tensor):
                self.copies[node] = self.graph.node_copy(node, self._argument)
        return self.copies[mask]

    def _argument(self, node: fx.Node) -> Argument:
        copy = self.copies.get(node)
        return _constant(node) if copy is None else copy


def _is_copied(node: fx.Node, copied: bool) -> bool:
    return copied and node.op in ("call_function", "call_method")


def _made_of(mask: fx.Node, size: int) -> dict[fx.Node, bool] | None:
    """Return the nodes that a mask depends on, in order, and whether each is recomputed; None if that is unknown."""
    constant: dict[fx.Node, bool] = {}
    nodes: dict[fx.Node, bool] = {}
    written = written_memories(mask.graph)

    def visit(node: fx.Node) -> None:
        if node in nodes:
            return
        if len(nodes) > LONGEST_RECIPE:
            raise Unsupported("too many operations")
        value = value_of(node)
        copied = _is_computed(node, written) and (_is_constant(node, constant, written) or _elements(value) >= size)
        if copied:
            for arg in node.all_input_nodes:
                visit(arg)
        nodes[node] = copied

    try:
        visit(mask)
    except Unsupported:
        return None
    return nodes


def _is_constant(node: fx.Node, known: dict[fx.Node, bool], written: Container[int | None]) -> bool:
    """Return whether a node depends only on constants and sizes."""
    if node not in known:
        known[node] = False
        tensors = [arg for arg in node.all_input_nodes if isinstance(value_of(arg), Tensor)]
        known[node] = _is_computed(node, written) and all(_is_constant(arg, known, written) for arg in tensors)
    return known[node]


def _is_computed(node: fx.Node, written: Container[int | None]) -> bool:
    """Return whether a node is a function of its arguments, in memory that nothing writes to, also through no view."""
    if node.op not in ("call_function", "call_method"):
        return False
    parts = pytree.tree_leaves(value_of(node))
    return not any(isinstance(part, Tensor) and memory_of(part) in written for part in parts)


def _is_symbolic(value: object) -> bool:
    """Return whether a value is, or has, a symbolic size."""
    sizes = value.shape if isinstance(value, Tensor) else value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _elements(value: object) -> int:
    return math.prod(map(number, value.shape)) if isinstance(value, Tensor) else 0


def value_of(node: object) -> object:
    """Return the value of a node as it was traced; other arguments are their own value."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else node


def tensor_of(node: object) -> FakeTensor:
    """Return the tensor that a node is.

    Raises:
        Unsupported: it is none, or not one of strides in memory.
    """
    value = value_of(node)
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        raise Unsupported("an argument is not a plain tensor")
    return value


def _constant(node: fx.Node) -> Argument:
    """Return the value of a node that is not a tensor, with numbers for sizes."""
    value = value_of(node)
    if isinstance(value, torch.SymInt):
        return number(value)
    if isinstance(value, (tuple, list)):
        return tuple(number(each) for each in value)
    if isinstance(value, (int, float, bool, torch.dtype, torch.device)):
        return value
    raise Unsupported("the mask depends on a value of unknown type")


def number(size: object) -> int:
    """Return a size as it was when the graph was traced.

    Raises:
        Unsupported: it is data-dependent.
    """
    hint = size.node.hint if isinstance(size, torch.SymInt) else size
    if not isinstance(hint, int):
        raise Unsupported("a data-dependent size")
    return hint


def without_data(value: FakeTensor, mode: FakeTensorMode, autocast: torch.dtype | None) -> Tensor:
    """Return a tensor like `value`, after autocast, without data or history."""
    dtype = value.dtype
    if autocast is not None and dtype.is_floating_point and dtype is not torch.float64:
        dtype = autocast
    shape, strides = ([number(size) for size in sizes] for sizes in (value.shape, value.stride()))
    with mode:
        fresh = torch.empty_strided(shape, strides, dtype=dtype, device=value.device)
    return fresh.requires_grad_(value.requires_grad and torch.is_grad_enabled())
