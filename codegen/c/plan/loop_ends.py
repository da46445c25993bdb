"""Ends loops early where all that they compute has no effect, so that no point is tested.

The last part of some rows is shorter than the others.  Its loads and stores are guarded by a comparison of indices, and
a compiler does not vectorise a loop over columns with such a guard.  A loop over the rows that ends with the last one
needs none.  Input: a kernel; output: the kernel without the guards, and for axes inside its programs the number of
points after which their loops end.  Such an axis may not have the lanes, nor may its end differ between lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from fusion.codegen.c.plan.lanes import Lanes, loop_order
from fusion.codegen.c.plan.loop_bounds import is_check, is_idle, limit_of
from fusion.codegen.c.plan.loop_fusion import Sweep
from fusion.lowering.algebra.conditions import simpler
from fusion.lowering.indexing import ONE, coefficient
from fusion.lowering.ir.expr import Expr, Load, const, free_axes, postorder, rewrite
from fusion.lowering.ir.kernel import (
    Fold,
    Kernel,
    KernelAxis,
    Prefix,
    Role,
    Spans,
    Stmt,
    Store,
    map_statements,
    spans,
    statements,
    values_of,
    with_values,
)

Ends = Mapping[sympy.Symbol, sympy.Expr]


def with_loop_ends(kernel: Kernel) -> tuple[Kernel, Ends]:
    """Return `kernel` without guards of whole iterations, and the ends of their loops; itself and {} if it has none."""
    where = spans(kernel)
    for axis in kernel.axes:
        if axis.role is Role.GRID:
            continue
        for condition, limit in _conditions(kernel, axis, where).items():
            unguarded = _unguarded(kernel, axis.symbol, condition, where)
            if unguarded is not None:
                return unguarded, {axis.symbol: sympy.expand(limit + axis.symbol + 1)}
    return kernel, {}


def suits(ends: Ends, sweeps: Sequence[Sweep], lanes: Lanes, where: Spans) -> bool:
    """Return whether loops may end there: neither they nor their ends belong to lanes."""
    own = {symbol for end in ends.values() for symbol in end.free_symbols}.union(ends)
    along = {axis.symbol for axis in (lanes.axis, lanes.tile, lanes.inner) if axis is not None}
    along |= {lane.symbol for sweep in sweeps for _, lane in [loop_order(sweep, lanes, where)] if lane is not None}
    return own.isdisjoint(along)


def _conditions(kernel: Kernel, axis: KernelAxis, where: Spans) -> dict[Expr, sympy.Expr]:
    """Return the comparisons that hold up to a point of an axis, each with what is at least 0 where it holds."""
    inner = {other.symbol for other in kernel.axes if other.role is not Role.GRID and other is not axis}
    found: dict[Expr, sympy.Expr] = {}
    for stmt in statements(kernel.body):
        for node in postorder(*values_of(stmt)):
            if node.dtype is torch.bool and axis.symbol in where[node] and inner.isdisjoint(where[node]):
                limit = limit_of(node, axis.symbol)
                if limit is not None and coefficient(limit, axis.symbol) == -1:
                    found[node] = limit
    return found


def _unguarded(kernel: Kernel, axis: sympy.Symbol, condition: Expr, where: Spans) -> Kernel | None:
    """Return `kernel` as it is where a condition holds; None if it has an effect along `axis` elsewhere."""
    body, sizes = list(statements(kernel.body)), kernel.axis_sizes()
    if any(isinstance(stmt, Prefix) for stmt in body) or not all(
        _is_guarded(s, axis, condition, where, sizes) for s in body
    ):
        return None

    def rule(node: Expr) -> Expr | None:
        return const(True, torch.bool) if node is condition else simpler(node)

    def unguarded(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Store) and stmt.where is condition:
            stmt = replace(stmt, where=None, axes=None)
        return with_values(stmt, rewrite(values_of(stmt), rule))

    result = replace(kernel, body=map_statements(kernel.body, unguarded))
    before = set(postorder(*(value for stmt in body for value in values_of(stmt))))
    after = set(postorder(*(value for stmt in statements(result.body) for value in values_of(stmt))))
    if any(is_check(node) and axis in free_axes(node) for node in before):
        return None  # eager checks each index, whatever its use
    if any((isinstance(node, Load) or is_check(node)) and axis not in free_axes(node) for node in after - before):
        return None  # the same in all iterations: it is loaded or checked before the loop, also if that is empty
    return result


def _is_guarded(
    stmt: Stmt, axis: sympy.Symbol, condition: Expr, where: Spans, sizes: Mapping[sympy.Symbol, sympy.Expr]
) -> bool:
    """Return whether a statement has no effect on later ones at those points of `axis` where a condition is false."""
    if isinstance(stmt, Fold):
        return stmt.carry is None and (axis not in stmt.over or is_idle(stmt, condition))
    if not isinstance(stmt, Store):
        return True
    spanned = {symbol for value in values_of(stmt) for symbol in where[value]}
    if isinstance(stmt.offset, sympy.Expr):
        spanned |= stmt.offset.free_symbols
    return axis not in spanned or (stmt.where is condition and _is_plain(stmt, sizes))


def _is_plain(store: Store, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> bool:
    """Return whether a store writes each element at most once, and over no axes but those of its offset."""
    if store.op != "store" or not isinstance(store.offset, sympy.Expr):
        return False
    offset = sympy.expand(store.offset)
    axes = [axis for axis in sizes if axis in offset.free_symbols]
    factors = {axis: coefficient(offset, axis) for axis in axes}
    strides = {axis: stride for axis, stride in factors.items() if stride is not None}
    if set(store.axes or axes) != set(axes) or len(strides) < len(axes):
        return False
    spanned = ONE  # elements that axes with smaller strides span
    while strides:
        known = [axis for axis, stride in strides.items() if stride.is_Integer]
        axis = min(known, key=lambda each: int(strides[each])) if known else next(iter(strides))
        stride = strides.pop(axis)
        if stride != spanned and not (stride.is_Integer and spanned.is_Integer and stride > spanned):
            return False
        spanned = sympy.expand(stride * sizes[axis])
    return True


__all__ = ["Ends", "suits", "with_loop_ends"]
