"""Stores results of maps once: without axes along which they do not vary, and one for equal ones.

    the bias of positions, expanded over a batch of b, in two layers:
    b × heads × rows × columns, twice      →      1 × heads × rows × columns

`Program → Program`.  Eager stores what the user's program says; a result that only kernels read may be smaller and
shared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sympy

from fusion.lowering.indexing import ZERO
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Expr, Load, free_axes, rewrite
from fusion.lowering.ir.program import Axis, Buffer, Compute, Extern, Map, Node, Program, reading, reads, with_exprs
from fusion.lowering.value import dense_strides, slowest_first
from fusion.schedule.layouts.private_maps import alternatives_with, private_maps


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
    private = private_maps(program)
    smaller: dict[str, tuple[int, ...]] = {}
    nodes: list[Node] = []
    buffers: list[Buffer] = []
    for node in program.nodes:
        if not isinstance(node, (Extern, Chunked)) and not smaller.keys().isdisjoint(reads(node)):
            node = _at_first_points(node, smaller)
        constant = _constant_axes(node) if isinstance(node, Map) and node.out in private else ()
        if isinstance(node, Map) and constant:
            smaller[node.out] = constant
            one = _without(program.buffers[node.out], constant)
            buffers.append(one)
            node = replace(node, axes=tuple(map(Axis, [axis.symbol for axis in node.axes], one.shape)))
        nodes.append(node)
    if not smaller:
        return program
    return program.edited(
        nodes, buffers=buffers, library=alternatives_with(program, lambda it: _at_first_points(it, smaller))
    )


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
    private = private_maps(program)
    first: dict[object, str] = {}
    merged: dict[str, str] = {}
    inlined = dict(program.inlined)
    nodes: list[Node] = []
    for node in program.nodes:
        if not isinstance(node, (Extern, Chunked)):
            node = reading(node, merged)
        if isinstance(node, Map) and node.out in private:
            buffer = program.buffers[node.out]
            same = first.setdefault((node.axes, node.expr, buffer.dtype, buffer.device), node.out)
            if same != node.out:
                merged[node.out] = same
                inlined[same] = (*inlined.get(same, ()), *inlined.get(node.out, ()), node.out)
                continue
        nodes.append(node)
    if not merged:
        return program
    return program.edited(
        nodes, inlined=inlined, library=alternatives_with(program, lambda node: reading(node, merged))
    )


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


def _without(buffer: Buffer, dropped: Collection[int]) -> Buffer:
    """Return a buffer with one element along the dropped dimensions, and the others in the order that they had."""
    shape = tuple(sympy.Integer(1) if k in dropped else size for k, size in enumerate(buffer.shape))
    return replace(buffer, shape=shape, strides=dense_strides(slowest_first(buffer.strides), shape))
