"""Computes a result that is copied into a caller's tensor in the layout of that tensor.

`Program → Program`.  A functional graph ends in copies into the inputs that the program overwrites.  A kernel can write
there itself (`launches/updates.py`) where the source is made by a kernel, for this copy alone, with the same dtype and
strides.  Here the source gets them: strides where nobody sees them but kernels, else a node of its own.  The latter
also of a product that a library's call may compute, which lays it out by itself.
Refused: copies between dtypes or devices that are not generated, and into tensors that overlap themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from fusion.lowering.builder import GENERATED_DTYPES
from fusion.lowering.chunks import Chunked
from fusion.lowering.expr import Load, make_cast
from fusion.lowering.indexing import axis_symbol
from fusion.lowering.program import (
    Axis,
    Buffer,
    BufferRef,
    Extern,
    Map,
    Node,
    Program,
    Scatter,
    reads,
    writes,
)
from fusion.lowering.updates import copied
from fusion.schedule.iteration.naming import unused


def own_sources(program: Program) -> Program:
    """The program with sources of its own for its copies into inputs; the same object where they have them."""
    calls = Counter(name for node in program.nodes if isinstance(node, (Extern, Chunked)) for name in reads(node))
    made = {name: node for node in program.nodes if not isinstance(node, (Extern, Chunked)) for name in writes(node)}
    private = made.keys() - program.output_names()
    buffers = dict(program.buffers)
    origins: dict[str, str] = {}
    nodes: list[Node] = []
    for node in program.nodes:
        target, source = copied(node, program) or (None, None)
        if target is None or source is None or not _fits(buffers[target], buffers[source]):
            nodes.append(node)
            continue
        old, new = buffers[target], buffers[source]
        place = _place(source, made)
        apart = private.issuperset(place) and sum(calls[name] for name in place) == 1
        movable = new.strides == old.strides or program.library.keys().isdisjoint(place)
        if new.dtype is old.dtype and apart and movable:
            buffers.update((name, replace(buffers[name], strides=old.strides)) for name in place)
            nodes.append(replace(node))  # a call of its own, as what it reads lies otherwise
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


def _place(name: str, made: Mapping[str, Node]) -> list[str]:
    """The buffers that are laid out as `name`: a scatter as what it begins with."""
    found = [name]
    while isinstance(node := made.get(found[-1]), Scatter):
        found.append(node.start)
    return found


def _fits(target: Buffer, source: Buffer) -> bool:
    generated = {target.dtype, source.dtype} <= GENERATED_DTYPES
    overlaps = any(stride == 0 and size != 1 for size, stride in zip(target.shape, target.strides, strict=True))
    return generated and target.shape == source.shape and target.device == source.device and not overlaps
