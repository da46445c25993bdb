"""Stores results of maps once: without axes along which they do not vary, one for equal ones, in the order of tiles.

    bias of positions, expanded over a batch of b, in two layers, heads last in memory, as eager's strides have it:
    b × heads × rows × columns, twice      →      1 × heads × rows × columns, columns beside one another

`Program → Program`.  Eager stores what the user's program says; a result that only kernels read may be smaller, shared
and in another order.  Results that the caller, a library call or a scatter sees keep their place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.indexing import ZERO, axis_symbol, flatten
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Expr, Load, free_axes, loads, rewrite
from fusion.lowering.ir.program import (
    Axis,
    Buffer,
    Compute,
    Extern,
    Map,
    Node,
    Program,
    Scatter,
    axis_sizes,
    reading,
    reads,
    with_exprs,
    writes,
)
from fusion.lowering.ir.sizes import estimate
from fusion.lowering.value import axes_of, contiguous_strides
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.clusters.tile_axes import Sizes, tile_axes
from fusion.schedule.iteration.contiguity import SCATTERED, is_scattered
from fusion.schedule.iteration.dependences import bytes_of
from fusion.schedule.iteration.naming import unused


def drop_constant_axes(program: Program) -> Program:
    """Store maps without the axes along which they do not vary; the same object if there are none.

    >>> from fusion.inspect.examples import show_program
    >>> from torch import empty
    >>> show_program(drop_constant_axes, lambda x, y: x / y.expand(8, 64).sin(), empty(8, 64), empty(64))
      input x: f32[8, 64]
      input y: f32[64]
    - sin: f32[8, 64] = map(i0:8, i1:64) sin(y[i1])
    + sin: f32[1, 64] = map(i0:1, i1:64) sin(y[i1])
    - div: f32[8, 64] = map(i0:8, i1:64) x[i0, i1] / sin[i0, i1]
    + div: f32[8, 64] = map(i0:8, i1:64) x[i0, i1] / sin[0, i1]
      return div
    """
    kept = _seen_by_others(program)
    smaller: dict[str, tuple[int, ...]] = {}
    nodes: list[Node] = []
    buffers: list[Buffer] = []
    for node in program.nodes:
        if not isinstance(node, (Extern, Chunked)) and not smaller.keys().isdisjoint(reads(node)):
            node = _at_first_points(node, smaller)
        constant = _constant_axes(node) if isinstance(node, Map) and node.out not in kept else ()
        if isinstance(node, Map) and constant:
            smaller[node.out] = constant
            one = _without(program.buffers[node.out], constant)
            buffers.append(one)
            node = replace(node, axes=tuple(map(Axis, [axis.symbol for axis in node.axes], one.shape)))
        nodes.append(node)
    return program.edited(nodes, buffers=buffers) if smaller else program


def merge_equal_maps(program: Program) -> Program:
    """Store maps with equal expressions once; the same object if there are none.

    >>> from fusion.inspect.examples import show_program
    >>> from torch import empty
    >>> def f(x, y):
    ...     return x / y.sin() + y.sin()
    >>> show_program(merge_equal_maps, f, empty(64), empty(64))
      input x: f32[64]
      input y: f32[64]
      sin: f32[64] = map(i0:64) sin(y[i0])
      div: f32[64] = map(i0:64) x[i0] / sin[i0]
    - sin_1: f32[64] = map(i0:64) sin(y[i0])
    - add: f32[64] = map(i0:64) div[i0] + sin_1[i0]
    + add: f32[64] = map(i0:64) div[i0] + sin[i0]
      return add
    """
    kept = _seen_by_others(program)
    first: dict[object, str] = {}
    merged: dict[str, str] = {}
    inlined = dict(program.inlined)
    nodes: list[Node] = []
    for node in program.nodes:
        if not isinstance(node, (Extern, Chunked)):
            node = reading(node, merged)
        if isinstance(node, Map) and node.out not in kept:
            same = first.setdefault((node.axes, node.expr, program.buffers[node.out].dtype), node.out)
            if same != node.out:
                merged[node.out] = same
                inlined[same] = (*inlined.get(same, ()), *inlined.get(node.out, ()), node.out)
                continue
        nodes.append(node)
    return program.edited(nodes, inlined=inlined) if merged else program


def order_for_tiles(
    program: Program,
    capabilities: Capabilities,
    chains: Sequence[Cluster],
    hints: Mapping[sympy.Symbol, int] | None = None,
) -> tuple[Program, tuple[Cluster, ...]]:
    """Store maps whose elements tiles would read one by one in the order of the tiles; copy other tensors into it.

    Only maps whose every reader then reads neighbours.  Other tensors are copied for chains, on targets that price
    memory requests (`Capabilities.sector`).  Return the program, and the chains in it.

    >>> from torch import empty
    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from fusion.schedule.chained import chain_products
    >>> def ordered(program):
    ...     program, chains = chain_products(program, TARGET.capabilities)
    ...     return order_for_tiles(program, TARGET.capabilities, chains)[0]
    >>> def f(q, k, bias):
    ...     return (q @ k.mT * bias.sin().permute(2, 0, 1)).amax(-1)
    >>> show_program(ordered, f, empty(64, 512, 64), empty(64, 512, 64), empty(512, 512, 64))
      input q: f32[64, 512, 64]
      input k: f32[64, 512, 64]
      input bias: f32[512, 512, 64]
      bmm: f32[64, 512, 512] = contract(i0:64, i1:512, i2:512 over r0:64; rows i1, columns i2; in f32) q[i0, i1,
            r0], k[i0, i2, r0]
    - sin: f32[512, 512, 64] = map(i0:512, i1:512, i2:64) sin(bias[i0, i1, i2])
    + sin: f32[512, 512, 64] strides (32768, 1, 512) = map(i0:512, i1:512, i2:64) sin(bias[i0, i1, i2])
      mul: f32[64, 512, 512] = map(i0:64, i1:512, i2:512) bmm[i0, i1, i2] * sin[i1, i2, i0]
      amax: f32[64, 512] = max(i0:64, i1:512 over r0:512) mul[i0, i1, r0]
      return amax
    """
    private = {node.out for node in program.nodes if isinstance(node, Map)} - _seen_by_others(program)
    chained = {member for cluster in chains for member in cluster.members}
    tiles = tile_axes(program, chains)
    readers: dict[str, list[tuple[Load, Sizes]]] = {}
    first: dict[str, int] = {}
    for position, node in enumerate(program.nodes):
        if isinstance(node, (Extern, Chunked)):
            continue
        for load in loads(*node.exprs):
            if load.buffer in private or (position in chained and capabilities.sector):
                readers.setdefault(load.buffer, []).append((load, tiles.get(position, axis_sizes(node))))
            if position in tiles:
                first.setdefault(load.buffer, position)
    buffers = {name: program.buffers[name] for name in first if name in readers}
    large = (buffer for buffer in buffers.values() if bytes_of(buffer, hints or {}) >= SCATTERED)
    ordered = [better for buffer in large if (better := _ordered(buffer, readers[buffer.name])) is not None]
    changed = program.edited(buffers=[buffer for buffer in ordered if buffer.name in private])
    copied = {buffer.name: buffer for buffer in ordered if buffer.name not in private}
    if not copied:
        return changed, tuple(chains)
    changed = _with_copies(changed, copied, first, chained)
    return changed, positions_in(changed, program, chains)


def _with_copies(
    program: Program, ordered: Mapping[str, Buffer], first: Mapping[str, int], chained: Collection[int]
) -> Program:
    """Return a program whose chains read copies of these buffers in another order."""
    names = {name: unused(f"{name}_ordered", program.buffers) for name in ordered}
    nodes: list[Node] = []
    for position, node in enumerate(program.nodes):
        for name in (name for name in ordered if first[name] == position):
            axes = tuple(Axis(axis_symbol(k), size) for k, size in enumerate(ordered[name].shape))
            nodes.append(Map(names[name], axes, Load(name, axes_of(ordered[name].shape), ordered[name].dtype)))
        is_chained = position in chained
        nodes.append(reading(node, names) if is_chained and not isinstance(node, (Extern, Chunked)) else node)
    copies = [replace(buffer, name=names[name]) for name, buffer in ordered.items()]
    origins = {names[name]: next(iter(writes(program.nodes[first[name]]))) for name in ordered}
    return program.edited(nodes, buffers=copies, origins=origins)


def _ordered(buffer: Buffer, readers: Sequence[tuple[Load, Sizes]]) -> Buffer | None:
    """Return a buffer whose readers all read neighbours, in rows or with another fastest dimension; None if they do."""
    overlaps = any(stride == 0 for stride in buffer.moving_strides)
    if overlaps or not any(_is_scattered(load, buffer.strides, sizes) for load, sizes in readers):
        return None
    order = _slowest_first(buffer)
    fastest_moved = ([*(k for k in order if k != last), last] for last in reversed(order))
    for candidate in (range(len(order)), *fastest_moved):
        strides = _dense(candidate, buffer.shape)
        if not any(_is_scattered(load, strides, sizes) for load, sizes in readers):
            return replace(buffer, strides=strides)
    return None


def _seen_by_others(program: Program) -> set[str]:
    """Return the buffers that the caller, calls, library alternatives or scatters see."""
    calls = [node for node in program.nodes if isinstance(node, (Extern, Chunked))]
    calls += [node for steps in program.library.values() for node in steps if isinstance(node, (Extern, Chunked))]
    seen = {name for call in calls for name in reads(call)} | program.output_names()
    return seen | {node.start for node in program.nodes if isinstance(node, Scatter)}


def _constant_axes(node: Map) -> tuple[int, ...]:
    """Return the dimensions of more than one element along which a map does not vary."""
    varied = free_axes(node.expr)
    return tuple(
        k for k, axis in enumerate(node.axes) if axis.symbol not in varied and axis.size.is_Integer and axis.size > 1
    )


def _at_first_points(node: Compute, dropped: Mapping[str, Sequence[int]]) -> Compute:
    """Return a node that reads smaller buffers at 0 along their dropped dimensions."""

    def rule(part: Expr) -> Expr | None:
        if not isinstance(part, Load) or part.buffer not in dropped:
            return None
        index = tuple(ZERO if k in dropped[part.buffer] else at for k, at in enumerate(part.index))
        return replace(part, index=index)

    return with_exprs(node, rewrite(node.exprs, rule))


def _is_scattered(load: Load, strides: Sequence[sympy.Expr], sizes: Sizes) -> bool:
    """Return whether a load along axes of these sizes reads no neighbours of a buffer with these strides."""
    return is_scattered(flatten(load.index, strides, sizes), sizes)


def _without(buffer: Buffer, dropped: Collection[int]) -> Buffer:
    """Return a buffer with one element along the dropped dimensions, and the others in the order that they had."""
    shape = tuple(sympy.Integer(1) if k in dropped else size for k, size in enumerate(buffer.shape))
    return replace(buffer, shape=shape, strides=_dense(_slowest_first(buffer), shape))


def _slowest_first(buffer: Buffer) -> list[int]:
    """Return the dimensions of a buffer by decreasing stride."""
    return sorted(range(len(buffer.shape)), key=lambda k: (-estimate(buffer.strides[k], {}), k))


def _dense(order: Sequence[int], shape: Sequence[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """Return the strides of a tensor without gaps, whose dimensions in memory have this order."""
    strides = dict(zip(order, contiguous_strides(tuple(shape[k] for k in order)), strict=True))
    return tuple(strides[k] for k in range(len(shape)))
