"""Plans a graph in which some operands have another order of dimensions in memory.

Operations return strides that follow from their operands', as in eager; operations that do not accept others,
and the results of the graph, read a copy in the old layout.  The copies are clones in the graph, which stays
executable.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TypeAlias, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusion.joint.layout import coincide, is_dense, with_strides

aten = torch.ops.aten

Strides: TypeAlias = tuple[int, ...]

Copy: TypeAlias = tuple[fx.Node, Strides]
"""A tensor, and the strides of its copy."""

CONVOLUTIONS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""Convolution → how many of its first arguments are images or weights.

They are named because they are opaque: the library computes them, and no rule lowers them.
"""


class NoLayout(Exception):
    """A tensor cannot have the strides that it must have."""


class LayoutPlan:
    """New strides of tensors, and the copies that they require; nothing is changed before `apply`.

    Args:
        wanted: returns the strides that operands of a node should have, given the plan so far; raises `NoLayout` if
            the node gains nothing by them.
        begins: bytes that could be moved in the launch overhead of a copy.
        fixed: returns whether the operands of a node keep their strides, where none are wanted.
    """

    def __init__(
        self,
        wanted: Callable[[LayoutPlan, fx.Node], Mapping[fx.Node, Strides]],
        begins: float,
        fixed: Callable[[fx.Node], bool] = lambda node: False,
    ) -> None:
        self._wanted, self._begins, self._fixed = wanted, begins, fixed
        self._values: dict[fx.Node, object] = {}  # the new fake result of each node that changes
        self.copies: dict[Copy, torch.Tensor] = {}
        self._read: dict[fx.Node, list[Copy]] = {}  # reader → the copies it reads instead

    def propagate(self, graph: fx.Graph) -> None:
        """Plan for all nodes in order.

        Raises:
            NoLayout: a tensor must get its old strides back, or other ones, and cannot.
        """
        for node in graph.nodes:
            changed = [arg for arg in node.all_input_nodes if arg in self._values]
            if wanted := self._wanted(self, node):
                for arg, strides in wanted.items():
                    if self.value_of(arg).stride() != strides:
                        self._copy(node, arg, strides)
                if not self._follow(node):
                    raise NoLayout
            elif changed and (self._fixed(node) or not (takes_any_strides(node) and self._follow(node))):
                for arg in changed:
                    before = arg.meta["val"]
                    if not isinstance(before, torch.Tensor) or not is_dense(before):
                        raise NoLayout
                    self._copy(node, arg, before.stride())

    def cost(self) -> float:
        """Return the bytes that the copies move, with their launches."""
        return sum(map(self.cost_of, self.copies))

    def cost_of(self, copy: Copy) -> float:
        """Return the bytes that a copy moves, with its launch; a copy of a generated tensor only adds a write.

        Strides that differ only in dimensions of one element are the same memory.
        """
        node, strides = copy
        if coincide(self.value_of(node), strides):
            return 0.0
        moved = bytes_of(self.copies[copy])
        return moved if is_generated(node) else 2 * moved + self._begins

    def copies_read_by(self, reader: fx.Node) -> Sequence[Copy]:
        """Return the copies that `reader` reads instead of its operands."""
        return self._read.get(reader, ())

    def is_changed(self, node: fx.Node) -> bool:
        """Return whether a result of `node` has other strides than before."""
        return node in self._values

    def accepts(self, node: fx.Node, wanted: Mapping[fx.Node, Strides]) -> bool:
        """Return whether `node` can read these operands in copies with other strides, without any other change."""
        if not takes_any_strides(node):
            return False
        copies = {arg: arg.meta["val"].new_empty_strided(arg.meta["val"].shape, to) for arg, to in wanted.items()}
        try:
            self._result(node, copies)
        except NoLayout:
            return False
        return True

    def apply(self, graph: fx.GraphModule) -> None:
        """Insert the copies, and update the fake tensors of all nodes."""
        for node, value in self._values.items():
            node.meta["val"] = value
            node.meta.pop("tensor_meta", None)
        inserted: dict[Copy, fx.Node] = {}
        for reader, copies in self._read.items():
            for copy in copies:
                if copy not in inserted:
                    with graph.graph.inserting_before(reader):
                        inserted[copy] = with_strides(copy[0], copy[1])
                reader.replace_input_with(copy[0], inserted[copy])
        graph.graph.lint()
        graph.recompile()

    def value_of(self, node: fx.Node) -> torch.Tensor:
        """Return the fake tensor of a node with one tensor as result."""
        return cast(torch.Tensor, self._values.get(node, node.meta["val"]))

    def read_by(self, reader: fx.Node, node: fx.Node) -> object:
        """Return the fake value of `node` as its reader sees it."""
        copied = (self.copies[copy] for copy in self._read.get(reader, ()) if copy[0] is node)
        return next(copied, self._values.get(node, node.meta.get("val")))

    def _copy(self, reader: fx.Node, arg: fx.Node, strides: Strides) -> None:
        if (arg, strides) not in self.copies:
            before = arg.meta["val"]
            self.copies[arg, strides] = before.new_empty_strided(before.shape, strides)
        self._read.setdefault(reader, []).append((arg, strides))

    def _follow(self, node: fx.Node) -> bool:
        """Record the strides of `node`'s results from its operands'; False if it does not accept these."""
        try:
            result = self._result(node, {})
        except NoLayout:
            return False
        pairs = zip(tensors_of(result), tensors_of(node.meta.get("val")), strict=True)
        if any(after.stride() != before.stride() for after, before in pairs):
            self._values[node] = result
        return True

    def _result(self, node: fx.Node, instead: Mapping[fx.Node, torch.Tensor]) -> object:
        """Return the fake result of `node`, with some operands replaced.

        Raises:
            NoLayout: it does not accept their strides.
        """

        def read(arg: fx.Node) -> object:
            return instead[arg] if arg in instead else self.read_by(node, arg)

        args, kwargs = pytree.tree_map_only(fx.Node, read, (node.args, node.kwargs))
        try:
            with torch.no_grad():
                result = cast("Callable[..., object]", node.target)(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError) as error:  # a view that these strides do not allow
            raise NoLayout from error
        pairs = zip(tensors_of(result), tensors_of(node.meta.get("val")), strict=True)
        if any(after.shape != before.shape or after.dtype != before.dtype for after, before in pairs):
            raise NoLayout
        return result


def takes_any_strides(node: fx.Node) -> bool:
    """Return whether operands may have other strides without any other change than the strides of the result."""
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
    """Return whether a generated kernel writes this tensor or the base of this view, so that any layout is possible."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "call_function" and node.target not in CONVOLUTIONS


def is_view(node: fx.Node) -> bool:
    """Return whether a node reads the memory of another one, or is one of its results."""
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def tensors_of(result: object) -> Iterable[torch.Tensor]:
    """Return the tensors among the results of an operation."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return (part for part in parts if isinstance(part, torch.Tensor))


def is_known(tensor: torch.Tensor) -> bool:
    """Return whether all sizes and strides are static."""
    return all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return prod(tensor.shape) * tensor.dtype.itemsize
