"""Refuses writes to memory that overlaps an operand, or that holds elements of the tensor several times.

`x[1:] = x[:-1]` depends on the order in which elements are written: eager refuses it.  A write to a view whose elements
share memory (`expand`, `unfold`) shows in all of its rows.  Tensors of one list (`torch._foreach_add_`) are changed one
after the other.  The functional graph that AOTAutograd makes has none of these effects.  Input: a graph that Dynamo
captured; one with such a write is refused, so that eager runs it.

Operands are compared as eager compares them (ATen's `assert_no_partial_overlap`): operands with gaps are not, and the
written tensor itself is allowed.  Symbolic sizes have their traced values.
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
        Unsupported: a written tensor has elements that share memory, or overlaps an operand partly.

    >>> from fusion.inspect.examples import show_captured
    >>> from torch import empty
    >>> show_captured(refuse_shared_writes, lambda x: x[1:].copy_(x[:-1]), empty(3))
    refused: the written tensor partly overlaps one that is read
    """
    for module in graph.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        self_overlapping: set[fx.Node] = set()
        for node in module.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, FakeTensor) and _is_view_of_one(node, value, self_overlapping):
                self_overlapping.add(node)
            _refuse(node, self_overlapping)


def _is_view_of_one(node: fx.Node, value: Tensor, self_overlapping: set[fx.Node]) -> bool:
    """Return whether this is a view whose elements share memory, or a view of such a view."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(viewed := source.meta.get("example_value"), FakeTensor):
        return False
    if memory_of(viewed) != memory_of(value):
        return False
    place = MemoryRange.of(value)
    return source in self_overlapping or (place is not None and place.overlaps_itself)


def _refuse(node: fx.Node, self_overlapping: set[fx.Node]) -> None:
    write = _write(node)
    if write is None:
        _refuse_together(node)
        return
    written, part, operands = write
    target: Tensor = written.meta["example_value"]
    whole = MemoryRange.of(target)
    if written in self_overlapping or (whole is not None and whole.overlaps_itself):
        message = "the written tensor has elements that share memory"
        raise Unsupported(message, hint="write to a clone() of it", origin=origin_of(node))
    for operand in operands:
        read = operand.meta.get("example_value")
        if isinstance(read, FakeTensor) and read is not target and memory_of(read) == memory_of(target):
            own, other = MemoryRange.of(part()), MemoryRange.of(read)
            if own is not None and other is not None and own.overlaps_partly(other):
                message = "the written tensor partly overlaps one that is read"
                raise Unsupported(message, hint="read from a clone() of it", origin=origin_of(node))


def _refuse_together(node: fx.Node) -> None:
    """Refuse a list of tensors that are changed one after the other (`torch._foreach_add_`), if they share elements."""
    if not node.args or not isinstance(node.args[0], (list, tuple)) or not changes_first(node):
        return
    changed = defaultdict[int | None, list[MemoryRange]](list)
    for written in node.args[0]:
        value = written.meta.get("example_value") if isinstance(written, fx.Node) else None
        if isinstance(value, FakeTensor) and (place := MemoryRange.of(value)) is not None and place.stop > place.start:
            changed[memory_of(value)].append(place)
    for places in changed.values():
        places.sort(key=lambda place: place.start)
        if any(before.overlaps(place) for before, place in pairwise(places)):
            message = "tensors that are changed together share elements"
            raise Unsupported(message, hint="change one after the other", origin=origin_of(node))


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """The location of a tensor in its storage, in bytes, and its layout."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, tensor: Tensor) -> MemoryRange | None:
        """Return the location of a tensor; None if a number is unknown."""
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
        """The strides and sizes of dimensions with more than one element, by increasing stride."""
        return sorted((step, size) for step, size in zip(self.strides, self.shape, strict=True) if size > 1)

    @property
    def overlaps_itself(self) -> bool:
        """Whether two elements may share memory."""
        reached = 0
        for step, size in self._steps:
            if step <= reached:
                return 0 not in self.shape
            reached += step * (size - 1)
        return False

    @property
    def stop(self) -> int:
        """The end of a dense tensor; its start if it has gaps, or no elements."""
        elements = 1
        for step, size in self._steps:
            if step != elements:
                return self.start
            elements *= size
        return self.start if 0 in self.shape else self.start + elements * self.itemsize

    def overlaps(self, other: MemoryRange) -> bool:
        """Return whether two dense tensors share elements."""
        return self.start < other.stop and other.start < self.stop

    def overlaps_partly(self, other: MemoryRange) -> bool:
        """Return whether two dense tensors share elements without being equal."""
        return self.overlaps(other) and (self.start, self.stop, self.strides) != (
            other.start,
            other.stop,
            other.strides,
        )


def _number(size: object) -> int | None:
    """Return the number that a size had when the graph was traced; None if it is unknown."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return hint if isinstance(hint, int) else None
    return size if isinstance(size, int) else None


def _write(node: fx.Node) -> tuple[fx.Node, Callable[[], Tensor], list[fx.Node]] | None:
    """Return the node that a call writes to, the written part, and the other operands; None if it writes nothing."""
    written = written_by(node)
    if written is None or not isinstance(target := written.meta.get("example_value"), FakeTensor):
        return None
    operands = [operand for operand in node.all_input_nodes if operand is not written]
    if node.target is operator.setitem:
        return written, partial(_part, target, node.args[1]), operands
    return written, lambda: target, operands


def _part(target: Tensor, index: Argument) -> Tensor:
    """Return the part that an index selects, or the full tensor for an index with tensors."""
    known = fx.map_arg(index, lambda node: node.meta.get("example_value"))
    items = known if isinstance(known, tuple) else (known,)
    if any(isinstance(item, (Tensor, list)) for item in items):
        return target
    with torch.no_grad():
        return target[known]  # type: ignore[index]  # an index, as the program wrote it
