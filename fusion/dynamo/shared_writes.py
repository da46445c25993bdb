"""Shared writes: regions that write to memory of which an operand, or the tensor itself, holds elements several times.

`x[1:] = x[:-1]` depends on the order in which elements are written: eager refuses it.  What is written to a view in
which elements meet (`expand`, `unfold`) shows in all of its rows.  Tensors of one list (`torch._foreach_add_`) are
changed one after the other.  None of this is true of the functional graph that AOTAutograd makes.  Input: a graph that
Dynamo captured, and one that does so is refused: eager decides what becomes of it.

Operands are compared as eager compares them (ATen's `assert_no_partial_overlap`): those with gaps are not, and one that
is the written tensor itself is allowed.  Sizes that are symbols have the values that the graph was traced with.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import Argument

from fusion.dynamo.writes import changes_first, memory_of, written_by
from fusion.lowering.builder import origin_of
from fusion.lowering.errors import Unsupported


def refuse_shared_writes(graph: fx.GraphModule) -> None:
    """Refuse a captured graph whose result would depend on the order in which elements are written.

    Raises:
        Unsupported: a tensor is written whose elements meet, or that partly lies over an operand.
    """
    for module in graph.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        meeting: set[fx.Node] = set()
        for node in module.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, FakeTensor) and _is_view_of_one(node, value, meeting):
                meeting.add(node)
            _refuse(node, meeting)


def _is_view_of_one(node: fx.Node, value: Tensor, meeting: set[fx.Node]) -> bool:
    """Do elements of this view meet, or those of what it is a view of?"""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(viewed := source.meta.get("example_value"), FakeTensor):
        return False
    if memory_of(viewed) != memory_of(value):
        return False
    place = Place.of(value)
    return source in meeting or (place is not None and place.meets)


def _refuse(node: fx.Node, meeting: set[fx.Node]) -> None:
    write = _write(node)
    if write is None:
        _refuse_together(node)
        return
    written, part, operands = write
    target: Tensor = written.meta["example_value"]
    whole = Place.of(target)
    if written in meeting or (whole is not None and whole.meets):
        message = "what is written has elements that are one in memory"
        raise Unsupported(message, hint="write to a clone() of it", origin=origin_of(node))
    for operand in operands:
        read = operand.meta.get("example_value")
        if isinstance(read, FakeTensor) and read is not target and memory_of(read) == memory_of(target):
            own, other = Place.of(part()), Place.of(read)
            if own is not None and other is not None and own.partly_over(other):
                message = "what is written partly lies over what is read"
                raise Unsupported(message, hint="read from a clone() of it", origin=origin_of(node))


def _refuse_together(node: fx.Node) -> None:
    """Refuse a list of tensors that are changed one after the other (`torch._foreach_add_`), if they share elements."""
    if not node.args or not isinstance(node.args[0], (list, tuple)) or not changes_first(node):
        return
    changed = defaultdict[int | None, list[Place]](list)
    for written in node.args[0]:
        value = written.meta.get("example_value") if isinstance(written, fx.Node) else None
        if isinstance(value, FakeTensor) and (place := Place.of(value)) is not None and place.stop > place.start:
            changed[memory_of(value)].append(place)
    for places in changed.values():
        places.sort(key=lambda place: place.start)
        if any(before.over(place) for before, place in pairwise(places)):
            message = "tensors that are changed together share elements"
            raise Unsupported(message, hint="change one after the other", origin=origin_of(node))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its storage, in bytes, and in what order."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, tensor: Tensor) -> Place | None:
        """The place of a tensor; None if a number is not known."""
        if tensor.layout is not torch.strided:
            return None
        numbers = [_number(n) for n in (tensor.storage_offset(), *tensor.shape, *tensor.stride())]
        if any(number is None for number in numbers):
            return None
        start, *others = [number for number in numbers if number is not None]
        shape, strides = tuple(others[: tensor.ndim]), tuple(others[tensor.ndim :])
        return cls(start * tensor.element_size(), shape, strides, tensor.element_size())

    @property
    def _steps(self) -> list[tuple[int, int]]:
        """Strides and sizes from the innermost dimension on, of those that have more than one element."""
        return sorted((step, size) for step, size in zip(self.strides, self.shape, strict=True) if size > 1)

    @property
    def meets(self) -> bool:
        """May two elements be one in memory?"""
        reached = 0
        for step, size in self._steps:
            if step <= reached:
                return 0 not in self.shape
            reached += step * (size - 1)
        return False

    @property
    def stop(self) -> int:
        """The end of a dense tensor; its start if there are gaps, or no elements."""
        elements = 1
        for step, size in self._steps:
            if step != elements:
                return self.start
            elements *= size
        return self.start if 0 in self.shape else self.start + elements * self.itemsize

    def over(self, other: Place) -> bool:
        """Do two dense tensors share elements?"""
        return self.start < other.stop and other.start < self.stop

    def partly_over(self, other: Place) -> bool:
        """Do they without being the same?"""
        return self.over(other) and (self.start, self.stop, self.strides) != (other.start, other.stop, other.strides)


def _number(size: object) -> int | None:
    """A size as it was when the graph was traced."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return hint if isinstance(hint, int) else None
    return size if isinstance(size, int) else None


def _write(node: fx.Node) -> tuple[fx.Node, Callable[[], Tensor], list[fx.Node]] | None:
    """The node that one writes to, the part of it, and what is read beside that; None if nothing is written."""
    written = written_by(node)
    if written is None or not isinstance(target := written.meta.get("example_value"), FakeTensor):
        return None
    operands = [operand for operand in node.all_input_nodes if operand is not written]
    if node.target is operator.setitem:
        return written, partial(_part, target, node.args[1]), operands
    return written, lambda: target, operands


def _part(target: Tensor, index: Argument) -> Tensor:
    """What an index names; all of it where tensors say that."""
    known = fx.map_arg(index, lambda node: node.meta.get("example_value"))
    items = known if isinstance(known, tuple) else (known,)
    if any(isinstance(item, (Tensor, list)) for item in items):
        return target
    with torch.no_grad():
        return target[known]  # type: ignore[index]  # an index, as the program wrote it
