"""Splits an axis into groups that share an index, so that lanes read neighbours.

The scale of quantised weights belongs to a group: `scale[r0 // 128]` would be gathered, lane by lane.  With one loop
over the groups and lanes inside each, it is loaded once a group.  Sums over rows of heads that are concatenated read
`x[i0 // 64, r0, i0 % 64]`, whose lanes are neighbours within a head.  Input: a kernel of folds; output: the kernel with
the axis as two.
"""

from __future__ import annotations

from dataclasses import replace

import sympy
from typing_extensions import assert_never

from fusion.lowering.indexing import axis_symbol, over_symbol, replace_axes, split_points, substitute_all
from fusion.lowering.ir.expr import index_of, postorder
from fusion.lowering.ir.kernel import (
    Fold,
    Kernel,
    KernelAxis,
    Loop,
    Prefix,
    Role,
    Stmt,
    Store,
    statements,
    values_of,
    with_values,
)

SHORTEST_GROUP = 32
"""The shortest group whose lanes are full."""


def with_groups(kernel: Kernel) -> Kernel:
    """Split each reduced axis of `kernel` at the shortest group that an index counts; the same object if none does."""
    if any(isinstance(stmt, Prefix) or (isinstance(stmt, Store) and stmt.axes) for stmt in statements(kernel.body)):
        return kernel
    for axis in kernel.axes:
        length = None if axis.role is Role.GRID else group_length(kernel, axis)
        if length is not None and length >= SHORTEST_GROUP:
            kernel = with_split_axis(kernel, axis, length)
    return kernel


def with_grouped_columns(kernel: Kernel) -> Kernel:
    """Split each grid axis of a kernel with folds at the shortest group that an index counts."""
    stmts = [*statements(kernel.body)]
    plain = all(isinstance(stmt, (Fold, Loop)) or (isinstance(stmt, Store) and not stmt.axes) for stmt in stmts)
    if not plain or not any(isinstance(stmt, Fold) for stmt in stmts):
        return kernel
    for axis in kernel.with_role(Role.GRID):
        length = group_length(kernel, axis)
        if length is not None and length >= SHORTEST_GROUP:
            kernel = with_split_axis(kernel, axis, length)
    return kernel


def group_length(kernel: Kernel, axis: KernelAxis) -> int | None:
    """Return the length of the shortest groups of an axis that an index counts; None if none does."""
    values = [value for stmt in statements(kernel.body) for value in values_of(stmt)]
    indices = [index for node in postorder(*values) for index in index_of(node)]
    points = split_points(indices, axis.symbol, axis.size)
    return points[0] if points else None


def with_split_axis(kernel: Kernel, axis: KernelAxis, length: int) -> Kernel:
    """Return a kernel with `axis` as groups of a length, and the points of a group."""
    taken = {other.symbol for other in kernel.axes}
    name = axis_symbol if axis.role is Role.GRID else over_symbol
    inner = replace(axis, symbol=next(s for s in map(name, range(len(taken) + 1)) if s not in taken))
    pair = (replace(axis, size=axis.size / length), replace(inner, size=sympy.Integer(length)))
    axes = tuple(new for other in kernel.axes for new in (pair if other is axis else (other,)))
    there = {axis.symbol: length * axis.symbol + inner.symbol}
    sizes = {other.symbol: other.size for other in axes}

    def both(symbols: tuple[sympy.Symbol, ...]) -> tuple[sympy.Symbol, ...]:
        return tuple(new for s in symbols for new in ((s, inner.symbol) if s == axis.symbol else (s,)))

    def split(stmt: Stmt) -> Stmt:
        stmt = with_values(stmt, substitute_all(values_of(stmt), there, sizes))
        match stmt:
            case Fold():
                return replace(stmt, over=both(stmt.over))
            case Loop():
                return replace(stmt, axes=both(stmt.axes), body=tuple(map(split, stmt.body)))
            case Store(offset=sympy.Expr() as offset):
                return replace(stmt, offset=replace_axes(offset, there, sizes))
            case Store() | Prefix():
                return stmt
            case _:
                assert_never(stmt)

    return replace(kernel, axes=axes, body=tuple(map(split, kernel.body)))
