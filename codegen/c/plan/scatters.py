"""Decides how the innermost loop of a scatter runs: in which order, under which condition, and what it fetches ahead.

A scatter combines values with elements at positions that are data.  Along an axis whose stride is known, as along the
columns of rows that are added to rows of a table, no two points meet: lanes may run along it, a condition of the rows
is tested once for each row, and the row of the table that a later iteration updates can be fetched early.

Input: a sweep and the axis of its lanes.
"""

from __future__ import annotations

import sympy

from fusion.codegen.c.plan.loop_fusion import Sweep
from fusion.lowering.indexing import stride_along
from fusion.lowering.ir.expr import Expr, Op, loads, postorder
from fusion.lowering.ir.kernel import KernelAxis, Spans, Store
from fusion.lowering.ir.scalar_ops import CHECKED


def scatters(store: Store) -> bool:
    """Return whether two points may store to one element."""
    return store.axes is not None or isinstance(store.offset, Expr)


def may_collide(sweep: Sweep, lane: KernelAxis | None = None) -> bool:
    """Return whether two points of a sweep may store to one element; with `lane`, two points along it."""
    scattered = [store for store in sweep.stores if scatters(store)]
    if lane is None or not scattered:
        return bool(scattered)
    read = {load.buffer for load in loads(*sweep.roots)}
    params = [store.param for store in sweep.stores]
    return any(
        not _is_apart(store, lane) or store.param in read or params.count(store.param) > 1 for store in scattered
    )


def _is_apart(store: Store, lane: KernelAxis) -> bool:
    """Return whether a store's elements along `lane` are as many as its points."""
    stride = stride_along(store.offset, lane.symbol)
    return stride is not None and stride.is_Integer and stride != 0


def common_condition(sweep: Sweep, axis: sympy.Symbol, where: Spans) -> Expr | None:
    """Return the condition under which a loop along `axis`, the innermost of a sweep, changes anything.

    None where it always does, where the condition varies along the axis, or where indices are checked in the loop.
    """
    conditions = {store.where for store in sweep.stores}
    condition = next(iter(conditions), None)
    if condition is None or len(conditions) > 1 or sweep.folds or sweep.keeps or sweep.scans:
        return None
    checked = (node for node in postorder(*sweep.roots) if isinstance(node, Op) and node.name == CHECKED)
    varies = axis in where[condition] or any(axis in where[node] for node in checked)
    return None if varies else condition


__all__ = ["common_condition", "may_collide", "scatters"]
