"""Assigns groups of quantised weights to warps, in products of few rows whose scales are for short groups.

Input: a Kernel with one product that `packed` has unpacked; output: a Kernel with one more axis, held whole, over the
groups in one line of memory, and a sum over that axis.  For groups of 64 bytes:

    dot over r0: 2048 of x[2*r0], w[r0]    →    dot over r0: 1024 of x[2*k], w[k]   at each r1: 2,
                                                sum over r1 of that,                 k = r0 + 64*(r0 // 64) + 64*r1

A program then requests full lines, for which memory is fastest, and each of its warps unpacks different weights.
For split-K, whose loops are short, a program takes the groups of two lines: half as many steps wait for their scales.
(measured: docs/performance.md, `group_per_warp`)
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from fusion.codegen.triton.rewrites.totals import total_of
from fusion.codegen.triton.rewrites.vectors import is_narrow
from fusion.lowering.indexing import FloorDiv, over_symbol, split_points, substitute_all
from fusion.lowering.ir.expr import index_of, postorder, rewrite
from fusion.lowering.ir.kernel import (
    Fold,
    Kernel,
    KernelAxis,
    Loop,
    Role,
    Stmt,
    Store,
    statements,
    values_of,
    with_values,
)

REQUEST_BYTES = 128
"""Bytes of a request for which memory is fastest."""

SHORTEST_GROUP = 32
"""Bytes of the shortest group that is a step of a warp."""

MOST_WARPS = 4
"""The most warps of a program, each with a group."""


def group_per_warp(kernel: Kernel) -> Kernel:
    """Return `kernel`, all of whose contractions form one product, with one group per warp; the same object for any
    other.
    """
    folds = tuple(statements(kernel.body, Fold))
    looped, loops = kernel.with_role(Role.LOOP), [stmt for stmt in kernel.body if isinstance(stmt, Loop)]
    if len(folds) < 2 or len(looped) != 1 or len(loops) != 1 or kernel.with_role(Role.WHOLE):
        return kernel
    if set(loops[0].body) != set(folds) or loops[0].where is not None or any(fold.op != "dot" for fold in folds):
        return kernel
    axis, total, group = looped[0], total_of(kernel.body, folds[0]), _group(folds, looped[0])
    if total is None or total.folds != folds or group is None:
        return kernel
    if not is_narrow(kernel, folds[0].rows, folds[0].columns):
        return kernel
    length = _bytes_at_once(kernel, axis, group)
    count = length // group
    group_axis = KernelAxis(over_symbol(1), sympy.Integer(count), Role.WHOLE)
    inner = replace(axis, size=axis.size / count)
    axes = (*(inner if other is axis else other for other in kernel.axes), group_axis)
    steps = FloorDiv(axis.symbol, sympy.Integer(group))
    index = {axis.symbol: axis.symbol + (length - group) * steps + group * group_axis.symbol}
    args = [arg for fold in folds for arg in fold.args]
    sizes = {other.symbol: other.size for other in axes}
    substituted = dict(zip(args, substitute_all(args, index, sizes), strict=True))
    parts = tuple(replace(fold, args=tuple(substituted[arg] for arg in fold.args)) for fold in folds)
    product = Fold("product", "sum", (total.value,), (group_axis.symbol,), folds[0].dtype)
    body: list[Stmt] = []
    for stmt in kernel.body:
        if isinstance(stmt, Loop):
            body += [replace(stmt, body=parts), product]
        else:
            assert isinstance(stmt, Store)
            body.append(with_values(stmt, rewrite(values_of(stmt), {total.value: product.ref}.get)))
    return replace(kernel, axes=axes, body=tuple(body))


def _bytes_at_once(kernel: Kernel, axis: KernelAxis, group: int) -> int:
    """Return the bytes whose groups a program takes at once: one line, or two for split-K."""
    two = 2 * REQUEST_BYTES
    fits = axis.size > two and axis.size % two == 0 and two <= MOST_WARPS * group
    return two if kernel.awaited and fits else REQUEST_BYTES


def _group(folds: tuple[Fold, ...], axis: KernelAxis) -> int | None:
    """Return the number of neighbours along `axis` that share a scale, if several such groups fill a line, and lines
    the axis.
    """
    nodes = postorder(*(arg for fold in folds for arg in fold.args))
    indices = [index for node in nodes for index in index_of(node)]
    group = next(iter(split_points(indices, axis.symbol, axis.size)), REQUEST_BYTES)
    fits = SHORTEST_GROUP <= group < REQUEST_BYTES and REQUEST_BYTES % group == 0
    return (
        group
        if fits and axis.size.is_Integer and axis.size > REQUEST_BYTES and axis.size % REQUEST_BYTES == 0
        else None
    )
