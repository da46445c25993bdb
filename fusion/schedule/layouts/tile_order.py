"""Stores maps in the order in which tiles read them, and copies other tensors into it.

    a bias of attention whose heads are next to each other in memory:
    strides (columns · heads, 1, heads) by rows, heads, columns      →      rows of columns for each head

`Program → Program`.  A tile of a product or a chain has rows, columns and folded axes; where a tensor is contiguous
along none of them, every element is a memory request, in each tile that reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.indexing import Sizes, axis_symbol, flatten
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Load, loads
from fusion.lowering.ir.program import Axis, Buffer, Extern, Map, Node, Program, axis_sizes, reading, writes
from fusion.lowering.value import axes_of, dense_strides, slowest_first
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.clusters.tile_axes import tile_axes
from fusion.schedule.iteration.contiguity import SCATTERED, is_scattered
from fusion.schedule.iteration.dependences import bytes_of
from fusion.schedule.iteration.naming import unused
from fusion.schedule.layouts.private_maps import private_maps


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
    private = private_maps(program)
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
    ordered = [better for buffer in large if (better := _ordered(buffer, readers[buffer.name], hints)) is not None]
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


def _ordered(
    buffer: Buffer, readers: Sequence[tuple[Load, Sizes]], hints: Mapping[sympy.Symbol, int] | None
) -> Buffer | None:
    """Return a buffer whose readers all read neighbours, in rows or with another fastest dimension; None if they do."""
    overlaps = any(stride == 0 for stride in buffer.moving_strides)
    if overlaps or not any(_is_scattered(load, buffer.strides, sizes, hints) for load, sizes in readers):
        return None
    order = slowest_first(buffer.strides)
    fastest_moved = ([*(k for k in order if k != last), last] for last in reversed(order))
    for candidate in (range(len(order)), *fastest_moved):
        strides = dense_strides(candidate, buffer.shape)
        if not any(_is_scattered(load, strides, sizes, hints) for load, sizes in readers):
            return replace(buffer, strides=strides)
    return None


def _is_scattered(
    load: Load, strides: Sequence[sympy.Expr], sizes: Sizes, hints: Mapping[sympy.Symbol, int] | None
) -> bool:
    """Return whether a load along axes of these sizes reads no neighbours of a buffer with these strides."""
    return is_scattered(flatten(load.index, strides, sizes), sizes, hints)
