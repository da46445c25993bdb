"""Plans a graph in which some operands lie in memory in another order of dimensions.

Operations give strides that follow from those of their operands, as in eager; those that cannot take others, and the
results of the graph, read a copy that lies as before.  The copies are clones in the graph, which can be run as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod
from typing import TypeAlias, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusion.joint.layout import is_dense, with_strides

aten = torch.ops.aten

Strides: TypeAlias = tuple[int, ...]

CONVOLUTIONS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""Convolution → how many of its first arguments are images or weights."""


class Refused(Exception):
    """A tensor cannot be given the strides that it must have."""


class Plan:
    """Which tensors get other strides, and where copies are needed; nothing is changed before `apply`.

    Args:
        wanted: the strides that operands of a node are to have, from the plan so far; `Refused` if the node gives
            nothing for these.
        begins: bytes that could be moved while the kernel of a copy begins and ends.
        fixed: whose operands keep their strides, where none are wanted.
    """

    def __init__(
        self,
        wanted: Callable[[Plan, fx.Node], Mapping[fx.Node, Strides]],
        begins: float,
        fixed: Callable[[fx.Node], bool] = lambda node: False,
    ) -> None:
        self._wanted, self._begins, self._fixed = wanted, begins, fixed
        self._values: dict[fx.Node, object] = {}  # what becomes of each node that changes
        self.copies: dict[tuple[fx.Node, Strides], torch.Tensor] = {}  # (of what, with which strides) → the copy
        self._read: dict[fx.Node, list[tuple[fx.Node, Strides]]] = {}  # reader → which copies it reads instead

    def walk(self, graph: fx.Graph) -> None:
        """Plan for all nodes in their order.

        Raises:
            Refused: something must have its strides back, and cannot, or must take others, and cannot.
        """
        for node in graph.nodes:
            changed = [arg for arg in node.all_input_nodes if arg in self._values]
            if wanted := self._wanted(self, node):
                for arg, strides in wanted.items():
                    if self.value_of(arg).stride() != strides:
                        self._copy(node, arg, strides)
                if not self._follow(node):
                    raise Refused
            elif changed and (self._fixed(node) or not (takes_any_strides(node) and self._follow(node))):
                for arg in changed:
                    before = arg.meta["val"]
                    if not isinstance(before, torch.Tensor) or not is_dense(before):
                        raise Refused
                    self._copy(node, arg, before.stride())

    def cost(self) -> float:
        """Bytes that the copies move.  What a kernel makes anyway is written once more, or only there."""
        made = [(copy, is_generated(node)) for (node, _), copy in self.copies.items()]
        return sum(bytes_of(copy) if generated else 2 * bytes_of(copy) + self._begins for copy, generated in made)

    def apply(self, graph: fx.GraphModule) -> None:
        """Make the copies, and say of all nodes which strides they have."""
        for node, value in self._values.items():
            node.meta["val"] = value
            node.meta.pop("tensor_meta", None)
        made: dict[tuple[fx.Node, Strides], fx.Node] = {}
        for reader, copies in self._read.items():
            for copy in copies:
                if copy not in made:
                    with graph.graph.inserting_before(reader):
                        made[copy] = with_strides(copy[0], copy[1])
                reader.replace_input_with(copy[0], made[copy])
        graph.graph.lint()
        graph.recompile()

    def value_of(self, node: fx.Node) -> torch.Tensor:
        """What a node that gives one tensor gives."""
        return cast(torch.Tensor, self._values.get(node, node.meta["val"]))

    def read_by(self, reader: fx.Node, node: fx.Node) -> object:
        """What `node` is to one that reads it."""
        copied = (self.copies[copy] for copy in self._read.get(reader, ()) if copy[0] is node)
        return next(copied, self._values.get(node, node.meta.get("val")))

    def _copy(self, reader: fx.Node, arg: fx.Node, strides: Strides) -> None:
        if (arg, strides) not in self.copies:
            before = arg.meta["val"]
            self.copies[arg, strides] = before.new_empty_strided(before.shape, strides)
        self._read.setdefault(reader, []).append((arg, strides))

    def _follow(self, node: fx.Node) -> bool:
        """Note the strides of what `node` gives, from those of its operands.  False if it does not take them."""
        args, kwargs = pytree.tree_map_only(fx.Node, partial(self.read_by, node), (node.args, node.kwargs))
        try:
            with torch.no_grad():
                result = cast("Callable[..., object]", node.target)(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError):  # a view that these strides do not allow
            return False
        pairs = list(zip(tensors_of(result), tensors_of(node.meta["val"]), strict=True))
        if any(made.shape != before.shape or made.dtype != before.dtype for made, before in pairs):
            return False
        if any(made.stride() != before.stride() for made, before in pairs):
            self._values[node] = result
        return True


def takes_any_strides(node: fx.Node) -> bool:
    """May operands lie otherwise, with the same numbers as the result, and nothing else changed?"""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    schema = node.target._schema
    by_address = any(
        argument.name == "storage_offset" for argument in schema.arguments
    )  # it reads memory, not elements
    return not (schema.is_mutable or by_address) and all(map(is_known, tensors_of(node.meta.get("val"))))


def is_generated(node: fx.Node) -> bool:
    """Is this made by a kernel that can write it in another order just as well, or a view of such a tensor?"""
    while getattr(node.target, "is_view", False) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "call_function" and node.target not in CONVOLUTIONS and node.target is not operator.getitem


def tensors_of(result: object) -> Iterable[torch.Tensor]:
    """The tensors of what an operation gives."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return (part for part in parts if isinstance(part, torch.Tensor))


def is_known(tensor: torch.Tensor) -> bool:
    """Are all sizes and strides numbers?"""
    return all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of its elements."""
    return prod(tensor.shape) * tensor.dtype.itemsize
