"""Collapses two axes through which nodes read the rows of a matrix into one.

    out[i, j, k] = f(x[S·i + j, k])      becomes      out[i, k] = f(x[i, k])

A model sees its logits as [batch, position, word], a product writes them as [row, word].  To be cut along rows, nodes
must have an axis of rows.  Input: a program and a buffer; output: an equal program in which all nodes that read the
buffer in this way, directly or not, have one axis for its rows, and tensors in between one dimension.  A node whose
result an extern or the caller needs in its own shape stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import sympy
from typing_extensions import assert_never

from fusion.lowering.indexing import FloorDiv, Mod, simplify, substitute_all
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Expr, Load, loads, rewrite
from fusion.lowering.ir.program import (
    Axis,
    Buffer,
    Compute,
    Contract,
    Extern,
    Map,
    Node,
    Program,
    Reduce,
    Scan,
    Scatter,
    axis_sizes,
    reads,
    with_exprs,
    writes,
)


def collapse(program: Program, buffer: str) -> Program:
    """Express the readers of `buffer` in terms of its rows; the same object if there is nothing to do."""
    kept = {name for node in program.nodes if isinstance(node, (Extern, Chunked, Scatter)) for name in reads(node)}
    kept |= program.output_names()
    buffers = dict(program.buffers)
    merged: dict[
        str, tuple[int, sympy.Expr]
    ] = {}  # buffer → the first of two merged dimensions, the size of the second
    rows = {buffer}  # buffers derived from it
    nodes: list[Node] = []
    for node in program.nodes:
        if isinstance(node, (Extern, Chunked, Scatter)):
            nodes.append(node)
            continue
        node = _reading(node, merged)
        pair = _pair(node, rows)
        if pair is not None and isinstance(node, Scan):
            return program  # the scan may run along one axis of the pair
        position = _position(node.axes, pair) if pair is not None else None
        if pair is not None and (position is None or node.out not in kept):
            node = _collapsed(node, pair)
            if position is not None:
                smaller = _with_merged_dimension(buffers[node.out], position)
                if smaller is None:
                    return program
                merged[node.out] = (position, buffers[node.out].shape[position + 1])
                buffers[node.out] = smaller
        if any(name in rows for name in reads(node)):
            rows.add(node.out)
        nodes.append(node)
    changed = (new for new, old in zip(nodes, program.nodes, strict=True) if new is not old)
    library = {name: () for node in changed for name in writes(node)}  # library calls read the tensors of before
    return program.edited(nodes, buffers=buffers.values(), library=library)


def _pair(node: Compute, rows: set[str]) -> tuple[Axis, Axis] | None:
    """Return the two neighbouring axes through which a node reads rows, over all of them."""
    pairs = [(a, b) for axes in (node.axes, node.over) for a, b in pairwise(axes)]
    read = [index for load in loads(*node.exprs) if load.buffer in rows for index in load.index]
    affine = [index for index in read if not isinstance(index, Expr)]
    return next(((a, b) for index in affine for a, b in pairs if index == a.symbol * b.size + b.symbol), None)


def _position(axes: Sequence[Axis], pair: tuple[Axis, Axis]) -> int | None:
    return axes.index(pair[0]) if pair[0] in axes else None


def _collapsed(node: Compute, pair: tuple[Axis, Axis]) -> Compute:
    """Merge both axes of `pair` into the first."""
    first, second = pair
    merged_axis = Axis(first.symbol, first.size * second.size)
    at = {first.symbol: FloorDiv(first.symbol, second.size), second.symbol: Mod(first.symbol, second.size)}

    def merged(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(merged_axis if axis == first else axis for axis in axes if axis != second)

    sizes = {**axis_sizes(node), merged_axis.symbol: merged_axis.size}
    node = with_exprs(node, substitute_all(node.exprs, at, sizes))
    match node:
        case Map():
            return replace(node, axes=merged(node.axes))
        case Reduce() | Contract():
            return replace(node, axes=merged(node.axes), over=merged(node.over))
        case Scan() | Scatter():
            raise AssertionError("the order of a scan and the points of a scatter keep their axes")
        case _:
            assert_never(node)


def _reading(node: Compute, merged: Mapping[str, tuple[int, sympy.Expr]]) -> Compute:
    """Merge two indices into one in loads of buffers whose dimensions were merged."""
    if not any(name in merged for name in reads(node)):
        return node
    sizes = axis_sizes(node)

    def rule(expr: Expr) -> Expr | None:
        if not isinstance(expr, Load) or expr.buffer not in merged:
            return None
        position, size = merged[expr.buffer]
        first, second = expr.index[position : position + 2]
        if isinstance(first, Expr) or isinstance(second, Expr):
            return None
        index = (*expr.index[:position], simplify(first * size + second, sizes), *expr.index[position + 2 :])
        return Load(expr.buffer, index, expr.dtype, expr.mask)

    return with_exprs(node, rewrite(node.exprs, rule))


def _with_merged_dimension(buffer: Buffer, position: int) -> Buffer | None:
    """Merge the dimensions at `position` and after it; None if they are not adjacent in memory."""
    if buffer.strides[position] != buffer.strides[position + 1] * buffer.shape[position + 1]:
        return None
    shape, strides = list(buffer.shape), list(buffer.strides)
    shape[position : position + 2] = [shape[position] * shape[position + 1]]
    del strides[position]
    return replace(buffer, shape=tuple(shape), strides=tuple(strides))
