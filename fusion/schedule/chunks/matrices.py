"""Passes the operands of a chunk's products to the library as matrices.

Input: contractions over tensors of any layout; output: strided views of their operands, and the library's call of the
product.  An operand that is computed where it is read, or whose rows have no uniform stride (hidden[:, :-1] as one
matrix), is copied into a matrix first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import sympy
import torch

from fusion.lowering.indexing import axis_symbol, coefficient, flatten, substitute
from fusion.lowering.ir.expr import Expr, Load, free_axes, loads
from fusion.lowering.ir.program import Axis, Buffer, BufferRef, Contract, Extern, Map, Node, axis_sizes
from fusion.lowering.value import contiguous_strides, dense_strides, slowest_first
from fusion.operations.products import aligned_product
from fusion.schedule.iteration.naming import unused

ROW_PADDING, LONG = 128, 1024
"""Bytes: the padding of a row for alignment, and the shortest row that is padded."""

aten = torch.ops.aten


def product_calls(node: Contract, buffers: dict[str, Buffer], alignment: int) -> tuple[Node, ...]:
    """Return views of the operands and the library's product of them; empty if an operand is not a strided matrix.

    Sizes that are not multiples of `alignment` bytes are multiplied in parts.  The buffers of the views are added to
    `buffers`.
    """
    symbols = [axis.symbol for axis in node.axes]
    sides = (node.rows, node.columns, tuple(axis.symbol for axis in node.over))
    if [len(side) for side in sides] != [1, 1, 1] or len(symbols) > 3 or symbols[-2:] != [*node.rows, *node.columns]:
        return ()
    (row,), (column,), (over,) = sides
    views: list[Extern] = []
    for expr, matrix in ((node.lhs, (row, over)), (node.rhs, (over, column))):
        view = strided_view(expr, (*symbols[:-2], *matrix), axis_sizes(node), buffers, f"{node.out}_{len(views)}")
        if view is None:
            return ()
        views.append(view)
    target = aten.mm.default if len(symbols) == 2 else aten.bmm.default
    args = tuple(BufferRef(str(view.outs[0])) for view in views)
    call = Extern((node.out,), target, args, reason="the library is faster here")
    out, sizes = buffers[node.out], axis_sizes(node)
    extents = [sizes[symbol] for symbol in (row, column, over)]
    known = all(extent.is_Integer for extent in extents)  # symbolic ones may turn out not to be aligned
    if alignment > 1 and not (known and all(extent * out.dtype.itemsize % alignment == 0 for extent in extents)):
        call = replace(call, target=aligned_product, args=(*args, [*out.strides]))
    return (*views, call)


def strided_view(
    expr: Expr,
    axes: tuple[sympy.Symbol, ...],
    sizes: Mapping[sympy.Symbol, sympy.Expr],
    buffers: dict[str, Buffer],
    name: str,
) -> Extern | None:
    """Return a load as a view with one dimension per axis, its buffer added to `buffers`; None if it is not affine."""
    if not isinstance(expr, Load) or expr.mask is not None:
        return None
    source = buffers[expr.buffer]
    offset = flatten(expr.index, source.strides, sizes)
    if isinstance(offset, Expr):
        return None
    coefficients = [coefficient(offset, axis) for axis in axes]
    strides = tuple(stride for stride in coefficients if stride is not None and not stride.free_symbols & set(axes))
    linear = sum(stride * axis for stride, axis in zip(strides, axes, strict=False))
    if len(strides) != len(axes) or sympy.expand(offset - linear) != 0:
        return None
    shape = tuple(sizes[axis] for axis in axes)
    name = unused(name, buffers)
    buffers[name] = Buffer(name, source.dtype, shape, strides, source.device)
    args = (BufferRef(source.name), [*shape], [*strides])
    return Extern((name,), aten.as_strided.default, args, is_view=True)


Copies = dict[Map, str]
"""A copy, as a map into a tensor without a name → the tensor."""


def with_matrices(
    node: Contract, buffers: dict[str, Buffer], copies: Copies, alignment: int, later: Collection[str] = ()
) -> tuple[Contract, list[Map]]:
    """Return a contraction of matrices, and the maps that copy operands into matrices.

    Operands that read a tensor of `later` stay as they are.  Buffers of copies are added to `buffers` and `copies`.
    """
    operands: list[Expr] = []
    copied: list[Map] = []
    for operand in (node.lhs, node.rhs):
        axes = _spanned(node, operand)
        symbols = tuple(axis.symbol for axis in axes)
        is_matrix = strided_view(operand, symbols, axis_sizes(node), dict(buffers), node.out) is not None
        if is_matrix or any(load.buffer in later for load in loads(operand)):
            operands.append(operand)
            continue
        own = tuple(Axis(axis_symbol(k), axis.size) for k, axis in enumerate(axes))
        moved = {old: axis.symbol for old, axis in zip(symbols, own, strict=True)}
        copy = Map("", own, substitute(operand, moved, {axis.symbol: axis.size for axis in own}))
        if copy not in copies:
            copies[copy] = name = unused(f"{node.out}_operand", buffers)
            shape = tuple(axis.size for axis in own)
            dense = Buffer(name, operand.dtype, shape, contiguous_strides(shape), buffers[node.out].device)
            buffers[name] = replace(dense, strides=aligned_strides(dense, shape, alignment))
            copied.append(replace(copy, out=name))
        operands.append(Load(copies[copy], symbols, operand.dtype))
    return replace(node, lhs=operands[0], rhs=operands[1]), copied


def _spanned(node: Contract, operand: Expr) -> tuple[Axis, ...]:
    """Return the axes of an operand in the order in which its loads name them, which is the order of memory."""
    order: dict[sympy.Symbol, None] = {}
    for load in loads(operand):
        for index in load.index:
            named = free_axes(index) if isinstance(index, Expr) else index.free_symbols
            order |= dict.fromkeys(sorted(named, key=str))
    order |= dict.fromkeys(sorted(free_axes(operand), key=str))
    known = {axis.symbol: axis for axis in (*node.axes, *node.over)}
    return tuple(known[symbol] for symbol in order if symbol in known)


def aligned_strides(buffer: Buffer, shape: tuple[sympy.Expr, ...], alignment: int) -> tuple[sympy.Expr, ...]:
    """Return strides for `shape` in the order of `buffer`'s dimensions in memory, with long rows padded to start at
    multiples of `alignment` bytes.

    Nothing is padded for a library that does not require it: on CPUs with AMX, oneDNN reads past the ends of padded
    rows (PyTorch 2.13, bfloat16), and a NaN there reaches its product.
    """
    order, sizes = slowest_first(buffer.strides), list(shape)
    row = int(sizes[order[-1]]) * buffer.dtype.itemsize if order and sizes[order[-1]].is_Integer else 0
    if len(sizes) > 1 and row >= LONG and row % alignment:
        sizes[order[-1]] = sympy.Integer(-(-row // ROW_PADDING) * ROW_PADDING // buffer.dtype.itemsize)
    return dense_strides(order, tuple(sizes))
