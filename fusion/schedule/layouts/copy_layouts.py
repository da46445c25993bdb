"""Computes a result that is copied into a caller's tensor in the layout of that tensor.

`Program → Program`.  A functional graph ends in copies into the inputs that the program overwrites.  A kernel can write
to these directly (`launches/updates.py`) if it computes the source for this copy alone, with the same dtype and
strides. This pass establishes that: it changes the source's strides if only kernels see them, else it adds a node.  The
latter also for a product that a library call may compute, which chooses its own layout, and for an operand of one,
since the call was traced with its layout. Refused: copies between dtypes or devices that are not generated, and into
tensors that overlap themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from fusion.lowering.builder import GENERATED_DTYPES
from fusion.lowering.indexing import axis_symbol
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Load, make_cast
from fusion.lowering.ir.program import (
    Axis,
    Buffer,
    BufferRef,
    Extern,
    Map,
    Node,
    Program,
    Scatter,
    copied,
    reads,
    writes,
)
from fusion.schedule.iteration.naming import unused


def write_in_copy_layout(program: Program) -> Program:
    """Give copies into inputs sources of their own; the same object where they have them.

    >>> from fusion.inspect.examples import show_program
    >>> from torch import empty
    >>> show_program(write_in_copy_layout, lambda x, y: x.copy_(y + 1), empty(3, 2).t(), empty(2, 3))
      input x: f32[2, 3] strides (1, 2)
      input y: f32[2, 3]
    - add: f32[2, 3] = map(i0:2, i1:3) y[i0, i1] + 1.0
    + add: f32[2, 3] strides (1, 2) = map(i0:2, i1:3) y[i0, i1] + 1.0
      copy_: f32[2, 3] strides (1, 2) = aten.copy_.default(x, add)  (impure; what is changed in place is copied
            there at the end)
      return copy_
    """
    calls = Counter(name for node in program.nodes if isinstance(node, (Extern, Chunked)) for name in reads(node))
    nodes_by_result = {
        name: node for node in program.nodes if not isinstance(node, (Extern, Chunked)) for name in writes(node)
    }
    of_library = {name for steps in program.library.values() for node in steps for name in reads(node)}
    of_library |= program.library.keys()
    private = nodes_by_result.keys() - program.output_names()
    buffers = dict(program.buffers)
    origins: dict[str, str] = {}
    nodes: list[Node] = []
    for node in program.nodes:
        target, source = copied(node, program) or (None, None)
        if target is None or source is None or not _fits(buffers[target], buffers[source]):
            nodes.append(node)
            continue
        old, new = buffers[target], buffers[source]
        same_layout = _with_same_layout(source, nodes_by_result)
        separable = private.issuperset(same_layout) and sum(calls[name] for name in same_layout) == 1
        movable = new.strides == old.strides or of_library.isdisjoint(same_layout)
        if new.dtype is old.dtype and separable and movable:
            buffers.update((name, replace(buffers[name], strides=old.strides)) for name in same_layout)
            nodes.append(replace(node))  # a new call, as its operand has another layout
            continue
        own = unused(f"{source}_stored", buffers)
        buffers[own] = replace(old, name=own)
        origins[own] = next(iter(writes(node)))
        axes = tuple(Axis(axis_symbol(k), size) for k, size in enumerate(old.shape))
        value = make_cast(Load(source, tuple(axis.symbol for axis in axes), new.dtype), old.dtype)
        assert isinstance(node, Extern)
        nodes += [Map(own, axes, value), replace(node, args=(BufferRef(target), BufferRef(own)))]
    if buffers == program.buffers:
        return program
    return program.edited(nodes, buffers=buffers.values(), origins=origins)


def _with_same_layout(name: str, nodes_by_result: Mapping[str, Node]) -> list[str]:
    """Return the buffers that share the layout of `name`: a scatter shares the layout of its start."""
    chain = [name]
    while isinstance(node := nodes_by_result.get(chain[-1]), Scatter):
        chain.append(node.start)
    return chain


def _fits(target: Buffer, source: Buffer) -> bool:
    generated = {target.dtype, source.dtype} <= GENERATED_DTYPES
    overlaps = any(stride == 0 and size != 1 for size, stride in zip(target.shape, target.strides, strict=True))
    return generated and target.shape == source.shape and target.device == source.device and not overlaps
