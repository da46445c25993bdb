"""Checks at each call that inputs overlap as at compilation, and otherwise runs the captured graph in eager.

A graph that changes an input in place is compiled for the overlaps its inputs had then: AOTAutograd makes views of one
base of inputs that share elements, and assumes that others do not.  Neither it nor Dynamo checks that at later calls,
which would give wrong numbers for other views.  Input: a compiled graph, with the graph that Dynamo captured; output: a
callable that compares the overlaps at each call, and runs the captured graph in eager if they differ, or if the base is
another one: of another shape, or with memory that reaches further.  Graphs that change nothing in place are returned as
they are.

If a result is a view of a changed input and its place is symbolic, AOTAutograd recreates it from that input with the
strides and the offset that the view has in the graph's new value, which is dense, in separate memory.  In an input that
begins within other memory, or has gaps, these are other elements: such a call runs in eager, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch._functorch._aot_autograd.functional_utils import ViewMetaSequence
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext

from fusion.joint.layout import is_dense
from fusion.runtime.disjoint import Disjoint, spans_of

Call: TypeAlias = Callable[..., object]

MAX_COMPARED = 16
"""With more tensors (the leaves of an optimizer step) it is only checked whether the changed ones are disjoint from all
others, and only if they were at compilation: comparing all pairs would take longer than the call."""


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Holds the assumptions of compiled code about the memory of its inputs.

    Attributes:
        layout: how inputs overlap; None if that does not matter.
        viewed: inputs that have to fill their memory.
    """

    layout: InputOverlaps | Disjoint | None
    viewed: tuple[int, ...]

    @classmethod
    def of(cls, inputs: Sequence[object]) -> Overlaps:
        """Return the assumptions of AOTAutograd's function of `inputs` in the current tracing context."""
        tensors = [k for k, value in enumerate(inputs) if isinstance(value, torch.Tensor) and _may_overlap(value)]
        changed = _changed(inputs) & set(tensors)
        layout: InputOverlaps | Disjoint | None = None
        if changed and 2 <= len(tensors) <= MAX_COMPARED:
            layout = InputOverlaps.of(inputs, tensors, changed, merged=_merged(inputs))
        elif changed and (disjoint := Disjoint(frozenset(changed), tuple(tensors))).holds(inputs):
            layout = disjoint
        return cls(layout, _viewed(inputs, changed))

    def around(self, compiled: Call, captured: Call) -> Call:
        """Return `compiled`, or a callable that decides at each call between it and `captured`, the same program run
        operation by operation.
        """
        layout, viewed = self.layout, self.viewed
        if layout is None and not viewed:
            return compiled

        def run(*args: object) -> object:
            lies = (layout is None or layout.holds(args)) and all(_fills_its_memory(args[k]) for k in viewed)
            return compiled(*args) if lies else captured(*args)

        return run


@dataclass(frozen=True, slots=True)
class InputOverlaps:
    """Describes the overlaps of inputs.

    Attributes:
        changed: the inputs that are changed in place.
        others: the inputs that they may overlap, themselves among them.
        apart: for overlapping pairs, the bytes from the changed one to the other.
        starts: the offsets of inputs that are views of one base, in elements.
        bases: for inputs of which AOTAutograd makes views of one base, properties of that base.
    """

    changed: tuple[int, ...]
    others: tuple[int, ...]
    apart: dict[tuple[int, int], int]
    starts: dict[int, int]
    bases: dict[int, tuple[int, ...]]

    @classmethod
    def of(
        cls, inputs: Sequence[object], tensors: Sequence[int], changed: Collection[int], *, merged: bool
    ) -> InputOverlaps:
        spans = spans_of(inputs, tensors)
        apart = {
            (a, b): spans[b][0] - spans[a][0]
            for a in changed
            for b in tensors
            if a != b and spans[a][0] < spans[b][1] and spans[b][0] < spans[a][1]
        }
        starts = {}
        members = {k for pair in apart for k in pair} if merged else set()
        for member in members:
            offset = inputs[member].storage_offset()  # type: ignore[attr-defined]  # a tensor
            if isinstance(offset, int):  # symbolic ones are guarded
                starts[member] = offset
        reached = max((spans[k][1] for k in members), default=0)
        known = {k: _base_of(inputs[k], reached) for k in members}
        bases = {k: base for k, base in known.items() if all(isinstance(n, int) for n in base)}
        return cls(tuple(sorted(changed)), tuple(tensors), apart, starts, bases)

    def holds(self, args: Sequence[object]) -> bool:
        """Return whether these inputs overlap as at compilation."""
        spans = spans_of(args, self.others)
        for a in self.changed:
            start, stop = spans[a]
            for b in self.others:
                if a != b:
                    gap = spans[b][0] - start if start < spans[b][1] and spans[b][0] < stop else None
                    if gap != self.apart.get((a, b)):
                        return False
        if any(_base_of(args[k]) != base for k, base in self.bases.items()):
            return False
        return all(args[k].storage_offset() == start for k, start in self.starts.items())  # type: ignore[attr-defined]  # tensors


def _base_of(tensor: object, reached: int | None = None) -> tuple[int, ...]:
    """Return shape and strides of a view's base, or the bytes of the memory of a tensor that is no view.

    AOTAutograd traces that memory as far as inputs reach: up to the address `reached`.
    """
    assert isinstance(tensor, torch.Tensor)
    if (base := tensor._base) is not None:
        return (*base.shape, *base.stride())
    memory = tensor.untyped_storage()
    return (memory.nbytes() if reached is None else reached - memory.data_ptr(),)


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Return whether another input may share this tensor's memory; parameters are assumed not to."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not isinstance(tensor, torch.nn.Parameter)
        and type(tensor) is torch.Tensor
    )


def _changed(inputs: Sequence[object]) -> set[int]:
    """Return the inputs that are mutated; all, if AOTAutograd has merged some and so numbers them differently."""
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return set()
    if _merged(inputs):
        return set(range(len(inputs)))
    return {k for k, info in enumerate(context.fw_metadata.input_info) if info.mutates_data}


def _viewed(inputs: Sequence[object], changed: Collection[int]) -> tuple[int, ...]:
    """Return the changed inputs of which results are views that AOTAutograd cannot recreate step by step."""
    context = TracingContext.try_get()
    if not changed or context is None or context.fw_metadata is None:
        return ()
    views = [info for info in context.fw_metadata.output_info if info.output_type is OutputType.alias_of_input]
    symbolic = [info for info in views if info.view_meta_sequence is None or _has_symbols(info.view_meta_sequence)]
    if symbolic and _merged(inputs):
        return tuple(sorted(changed))
    return tuple(sorted(set(changed).intersection(info.base_idx for info in symbolic)))


def _has_symbols(views: ViewMetaSequence) -> bool:
    return any(view.has_symbolic_inputs for view in views.sequence)


def _fills_its_memory(tensor: object) -> bool:
    """Return whether a tensor begins where its storage does, without gaps between its elements."""
    assert isinstance(tensor, torch.Tensor)
    return tensor.storage_offset() == 0 and is_dense(tensor)


def _merged(inputs: Sequence[object]) -> bool:
    """Return whether AOTAutograd treats several inputs as views of one base."""
    context = TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    return known is not None and len(known.input_info) != len(inputs)
