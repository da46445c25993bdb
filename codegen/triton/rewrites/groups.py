"""Groups: a long sum of products as sums of short ones, so that what belongs to a group is loaded once for it.

What enters is a Kernel of sums over one walked axis; what leaves is a Kernel that walks groups of neighbours, sums up
each at once, and then these sums:

    sum over r0: 4096 of x[r0] * (w[r0] * s[r0 // 128])   →   part = sum over r1: 128
                                                                     of x[128*r0 + r1] * w[128*r0 + r1]
                                                              sum over r0: 32 of part * s[r0]

A group is what some load, such as the scale of quantised weights, is the same for.  Where there is none, it is what a
thread loads in one word of 16 bytes: a thread then keeps one running sum for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from fusion.lowering.expr import index_of, loads, postorder
from fusion.lowering.hoist import hoist
from fusion.lowering.indexing import coefficient, over_symbol, split_points, substitute_all
from fusion.lowering.kernel import Fold, Kernel, KernelAxis, Loop, Role, statements

LEAST, MOST = 16, 1024
"""The shortest and longest group that is held whole."""

WORD = 16
"""Bytes that a thread loads at once."""


def grouped(kernel: Kernel) -> Kernel:
    """`kernel` with its walked axis as groups; the same object where there are none, or where it does anything else."""
    walked = kernel.with_role(Role.LOOP)
    found = list(statements(kernel.body, Fold))
    loops = [stmt for stmt in kernel.body if isinstance(stmt, Loop)]
    if len(walked) != 1 or len(loops) != 1 or kernel.with_role(Role.WHOLE) or kernel.then is not None:
        return kernel
    axis = walked[0]
    if any(fold.op != "sum" or fold.over != (axis.symbol,) for fold in found) or set(found) != set(loops[0].body):
        return kernel
    if not _is_contiguous(kernel, found, axis):  # a sum per column: its group is one number, no shorter sum
        return kernel
    length = _group(found, axis) or _word(kernel, axis)
    if length is None:
        return kernel
    inner = KernelAxis(over_symbol(1), sympy.Integer(length), Role.WHOLE)
    outer = replace(axis, size=axis.size / length)
    axes = (*(outer if other is axis else other for other in kernel.axes), inner)
    sizes = {other.symbol: other.size for other in axes}
    place = {axis.symbol: length * outer.symbol + inner.symbol}
    parts, sums = [], []
    for fold in found:
        hoisted = hoist(substitute_all(fold.args, place, sizes), (inner.symbol,))
        part = replace(fold, name=f"{fold.name}_part", args=hoisted.operands, over=(inner.symbol,))
        parts.append(part)
        sums.append(replace(fold, args=(hoisted.scaled(part.ref),)))
    walk = replace(loops[0], body=(*parts, *sums))
    body = tuple(walk if isinstance(stmt, Loop) else stmt for stmt in kernel.body)
    return replace(kernel, axes=axes, body=body)


def _is_contiguous(kernel: Kernel, found: Sequence[Fold], axis: KernelAxis) -> bool:
    """Is a load that varies along GRID axes, of the matrix, contiguous along the walked one?"""
    grid = {other.symbol for other in kernel.with_role(Role.GRID)}
    offsets = [index for fold in found for load in loads(*fold.args) for index in index_of(load)]
    return any(coefficient(offset, axis.symbol) == 1 for offset in offsets if grid & offset.free_symbols)


def _group(found: list[Fold], axis: KernelAxis) -> int | None:
    """The length of the groups."""
    indices = [index for fold in found for node in postorder(*fold.args) for index in index_of(node)]
    points = split_points(indices, axis.symbol, axis.size)
    return points[0] if points and LEAST <= points[0] <= MOST else None


def _word(kernel: Kernel, axis: KernelAxis) -> int | None:
    """How many elements of the largest tensor are one word, if the axis consists of words."""
    sizes = [(param.dtype.itemsize, param.extent) for param in kernel.params if param.extent.is_Integer]
    length = WORD // max(sizes, key=lambda size: size[0] * size[1])[0] if sizes else 1
    return length if length > 1 and (axis.size / length).is_Integer else None
