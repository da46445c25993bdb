"""Splits a long sum of products into short ones, so that a value of a group, such as a scale, is loaded once for it.

Input: a Kernel of sums over one LOOP axis; output: a Kernel that loops over groups of neighbours, sums each group at
once, and then sums these:

    sum over r0: 4096 of x[r0] * (w[r0] * s[r0 // 128])   →   part = sum over r1: 128
                                                                     of x[128*r0 + r1] * w[128*r0 + r1]
                                                              sum over r0: 32 of part * s[r0]

A group consists of the neighbours for which some load, such as the scale of quantised weights, is the same.  Where no
load is, it consists of the elements that a thread loads in one word of 16 bytes: a thread then keeps one running sum
for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from fusion.lowering.algebra.hoist import hoist
from fusion.lowering.indexing import coefficient, over_symbol, split_points, substitute_all
from fusion.lowering.ir.expr import index_of, loads, postorder
from fusion.lowering.ir.kernel import Fold, Kernel, KernelAxis, Loop, Role, statements

SMALLEST_GROUP, LARGEST_GROUP = 16, 1024
"""The shortest and longest group that is held whole."""

LOADED_BYTES = 16
"""Bytes that a thread loads at once."""


def grouped(kernel: Kernel) -> Kernel:
    """Return `kernel` with its LOOP axis split into groups; the same object if it has none, or other folds or axes."""
    looped = kernel.with_role(Role.LOOP)
    folds = list(statements(kernel.body, Fold))
    loops = [stmt for stmt in kernel.body if isinstance(stmt, Loop)]
    if len(looped) != 1 or len(loops) != 1 or kernel.with_role(Role.WHOLE) or kernel.then is not None:
        return kernel
    axis = looped[0]
    if any(fold.op != "sum" or fold.over != (axis.symbol,) for fold in folds) or set(folds) != set(loops[0].body):
        return kernel
    if not _is_contiguous(kernel, folds, axis):  # a sum per column: its group is one number, no shorter sum
        return kernel
    length = _group(folds, axis) or _word(kernel, axis)
    if length is None:
        return kernel
    inner = KernelAxis(over_symbol(1), sympy.Integer(length), Role.WHOLE)
    outer = replace(axis, size=axis.size / length)
    axes = (*(outer if other is axis else other for other in kernel.axes), inner)
    sizes = {other.symbol: other.size for other in axes}
    index = {axis.symbol: length * outer.symbol + inner.symbol}
    parts, sums = [], []
    for fold in folds:
        hoisted = hoist(substitute_all(fold.args, index, sizes), (inner.symbol,))
        part = replace(fold, name=f"{fold.name}_part", args=hoisted.operands, over=(inner.symbol,))
        parts.append(part)
        sums.append(replace(fold, args=(hoisted.scaled(part.ref),)))
    loop = replace(loops[0], body=(*parts, *sums))
    body = tuple(loop if isinstance(stmt, Loop) else stmt for stmt in kernel.body)
    return replace(kernel, axes=axes, body=body)


def _is_contiguous(kernel: Kernel, folds: Sequence[Fold], axis: KernelAxis) -> bool:
    """Return whether a load of the matrix, which varies along GRID axes, is contiguous along the LOOP axis."""
    grid = {other.symbol for other in kernel.with_role(Role.GRID)}
    offsets = [index for fold in folds for load in loads(*fold.args) for index in index_of(load)]
    return any(coefficient(offset, axis.symbol) == 1 for offset in offsets if grid & offset.free_symbols)


def _group(folds: list[Fold], axis: KernelAxis) -> int | None:
    """Return the length of the groups; None if no load is the same for several neighbours."""
    indices = [index for fold in folds for node in postorder(*fold.args) for index in index_of(node)]
    points = split_points(indices, axis.symbol, axis.size)
    return points[0] if points and SMALLEST_GROUP <= points[0] <= LARGEST_GROUP else None


def _word(kernel: Kernel, axis: KernelAxis) -> int | None:
    """Return the elements of the largest tensor in one word, if the axis consists of full words."""
    sizes = [(param.dtype.itemsize, int(param.extent)) for param in kernel.params if param.extent.is_Integer]
    length = LOADED_BYTES // max(sizes, key=lambda size: size[0] * size[1])[0] if sizes else 1
    return length if length > 1 and (axis.size / length).is_Integer else None
