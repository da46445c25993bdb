"""Unrolls a very short axis that another one continues in memory, so that lanes are full.

The last axis of two stacked halves, of unpacked 4-bit numbers or of complex numbers has two points.  Lanes along it
would be two; lanes along the axis before it skip every second element.  One store for each of its points in one loop
over the axis before it writes whole vectors, and computes their common subexpressions once; a fold over it takes in
both points at once.  Input: a kernel that only stores, or folds; output: the kernel without that axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce

import sympy

from fusion.codegen.c.plan.lanes import FEWER_POINTS, accesses, best_axis, continued
from fusion.codegen.c.plan.loop_fusion import sweeps_of
from fusion.codegen.c.plan.strip_mining import group_length, with_split_axis
from fusion.lowering.algebra.positions import simplify_all
from fusion.lowering.indexing import replace_axes, substitute_all
from fusion.lowering.ir.expr import Expr, Op, postorder
from fusion.lowering.ir.kernel import (
    Fold,
    Kernel,
    KernelAxis,
    Loop,
    Prefix,
    Role,
    Spans,
    Stmt,
    Store,
    spans,
    statements,
    values_of,
    with_values,
)
from fusion.lowering.ir.scalar_ops import FoldName, joined_by

MOST_NODES = 200
"""Size of the largest unrolled body."""


def with_unrolled_axis(kernel: Kernel) -> Kernel:
    """Write a store for each point of the very short axis that most memory of `kernel` is contiguous along."""
    return _unrolled(kernel, _with_unrolled_axis)


def with_unrolled_folds(kernel: Kernel) -> Kernel:
    """Fold all points at once of a very short axis that most memory of the folds is contiguous along."""
    return _unrolled(kernel, _with_unrolled_folds)


def _unrolled(kernel: Kernel, unroll: Callable[[Kernel], Kernel]) -> Kernel:
    """Unroll the very short axis of `kernel`, or of an axis whose very short groups read the same element."""
    result = unroll(kernel)
    if result is not kernel or any(stmt for stmt in statements(kernel.body) if isinstance(stmt, Prefix)):
        return result
    for axis in kernel.axes:
        length = group_length(kernel, axis)
        if length is not None and length <= FEWER_POINTS:
            split = with_split_axis(kernel, axis, length)
            result = unroll(split)
            if result is not split:
                return result
    return kernel


def _with_unrolled_axis(kernel: Kernel) -> Kernel:
    grid = kernel.with_role(Role.GRID)
    stores = [stmt for stmt in kernel.body if isinstance(stmt, Store) and stmt.axes is None]
    if len(grid) < 2 or len(grid) < len(kernel.axes) or len(stores) < len(kernel.body):
        return kernel
    used = accesses(sweeps_of(kernel), spans(kernel))
    axis = best_axis(grid, used)
    if continued(axis, grid, used) is None:
        return kernel
    if int(axis.size) * len(postorder(*(value for store in stores for value in values_of(store)))) > MOST_NODES:
        return kernel
    body = dict.fromkeys(part for store in stores for part in _parts(store, axis, kernel))
    return replace(kernel, axes=tuple(other for other in kernel.axes if other is not axis), body=tuple(body))


def _with_unrolled_folds(kernel: Kernel) -> Kernel:
    reduced = [axis for axis in kernel.axes if axis.role is not Role.GRID]
    every = list(statements(kernel.body))
    folds = [stmt for stmt in every if isinstance(stmt, Fold)]
    if len(reduced) < 2 or any(isinstance(stmt, Prefix) or (isinstance(stmt, Fold) and stmt.carry) for stmt in every):
        return kernel
    where = spans(kernel)
    used = accesses(sweeps_of(kernel), where)
    axis = best_axis(reduced, used)
    over = [fold for fold in folds if axis.symbol in fold.over]
    along = [stmt for stmt in every if isinstance(stmt, Store) and axis.symbol in _spanned(stmt, where)]
    if continued(axis, reduced, used) is None or not all(fold.op in _UNROLLED for fold in over):
        return kernel
    if any(store not in kernel.body or store.axes is not None or isinstance(store.offset, Expr) for store in along):
        return kernel
    unrolled: list[Stmt] = [*over, *along]
    if int(axis.size) * len(postorder(*(value for stmt in unrolled for value in values_of(stmt)))) > MOST_NODES:
        return kernel
    return replace(
        kernel,
        axes=tuple(other for other in kernel.axes if other is not axis),
        body=tuple(
            part
            for stmt in kernel.body
            for part in (_parts(stmt, axis, kernel) if stmt in along else [_folded(stmt, axis, kernel)])
        ),
    )


_UNROLLED: frozenset[FoldName] = frozenset({"sum", "max", "min"})
"""The folds whose elements are joined by operations."""


def _spanned(store: Store, where: Spans) -> frozenset[sympy.Symbol]:
    """Return the axes that a store varies along."""
    own = store.offset.free_symbols if isinstance(store.offset, sympy.Expr) else frozenset()
    return frozenset(own).union(store.axes or (), *(where[value] for value in values_of(store)))


def _folded(stmt: Stmt, axis: KernelAxis, kernel: Kernel) -> Stmt:
    """Return a statement without an axis, whose points are joined in the arguments of folds over it."""
    if isinstance(stmt, Loop):
        axes = tuple(symbol for symbol in stmt.axes if symbol != axis.symbol)
        return replace(stmt, axes=axes, body=tuple(_folded(inner, axis, kernel) for inner in stmt.body))
    if not isinstance(stmt, Fold) or axis.symbol not in stmt.over:
        return stmt
    sizes = {symbol: size for symbol, size in kernel.axis_sizes().items() if symbol != axis.symbol}
    points = [
        simplify_all(substitute_all(stmt.args, {axis.symbol: sympy.Integer(number)}, sizes), sizes)[0]
        for number in range(int(axis.size))
    ]
    joined = reduce(lambda left, right: Op(joined_by(stmt.op), (left, right), left.dtype), points)
    return replace(stmt, args=(joined,), over=tuple(symbol for symbol in stmt.over if symbol != axis.symbol))


def _parts(store: Store, axis: KernelAxis, kernel: Kernel) -> Iterator[Store]:
    """Yield a store for each point of an axis."""
    sizes = {symbol: size for symbol, size in kernel.axis_sizes().items() if symbol != axis.symbol}
    for number in range(int(axis.size)):
        there = {axis.symbol: sympy.Integer(number)}
        part = with_values(store, simplify_all(substitute_all(values_of(store), there, sizes), sizes))
        if not isinstance(store.offset, Expr):
            part = replace(part, offset=replace_axes(store.offset, there, sizes))
        yield part
