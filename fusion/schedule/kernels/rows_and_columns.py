"""Builds the axes and the body of a kernel that folds rows and sums their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from fusion.lowering.ir.expr import Expr
from fusion.lowering.ir.kernel import KernelAxis, Loop, Role, Stmt
from fusion.lowering.ir.program import Axis
from fusion.schedule.clusters.expand import Expanded
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.iteration.axes import accesses_of, drop_ones, indices_of, merge, order_by_stride
from fusion.schedule.kernels.axes import canonical, with_axes
from fusion.schedule.kernels.bodies import offset_symbols, store_of


def rows_and_columns_body(cluster: Cluster, expanded: Expanded) -> tuple[tuple[KernelAxis, ...], tuple[Stmt, ...]]:
    """Return the axes and the body of a kernel that loops over rows, holds each whole, and adds it to running sums.

    Folds along a row are complete at once, and its results are stored in the loop; sums follow the loop.
    """
    space = cluster.space
    spread = [axis for axis in space.parallel if axis.symbol not in space.held]
    held = [axis for axis in space.parallel if axis.symbol in space.held]
    grid, expanded = _merged(spread, (*space.reduced, *held), expanded)
    looped, expanded = _merged(space.reduced, (*grid, *held), expanded)
    columns, expanded = _merged(held, (*grid, *looped), expanded)
    along = {axis.symbol for axis in held}
    folds = tuple(
        replace(fold, over=tuple(axis.symbol for axis in (columns if along.issuperset(fold.over) else looped)))
        for fold in expanded.folds
    )
    inner = (*looped, *columns)
    grid, inner, expanded = canonical(grid, inner, replace(expanded, folds=folds))
    looped, columns = inner[: len(looped)], inner[len(looped) :]
    axes = (
        *(KernelAxis(axis.symbol, axis.size, Role.GRID) for axis in grid),
        *(KernelAxis(axis.symbol, axis.size, Role.LOOP) for axis in looped),
        *(KernelAxis(axis.symbol, axis.size, Role.WHOLE) for axis in columns),
    )
    over = tuple(axis.symbol for axis in looped)
    stores = [store_of(write, (*grid, *inner)) for write in expanded.writes]
    within = [store for store in stores if not offset_symbols(store.offset).isdisjoint(over)]
    body: tuple[Stmt, ...] = (
        Loop(over, (*expanded.folds, *within)),
        *(store for store in stores if store not in within),
    )
    return axes, body


def _merged(axes: Sequence[Axis], others: Sequence[Axis], expanded: Expanded) -> tuple[tuple[Axis, ...], Expanded]:
    """Return axes of one role in memory order, merged where all accesses allow it, and the expansion over them."""
    kept, ones = drop_ones(axes)
    if not kept:
        kept = tuple(axes[-1:])
        ones.pop(kept[0].symbol)
    expanded = with_axes(expanded, ones, axes, others)
    kept = order_by_stride(kept, [*_offsets(expanded), *accesses_of(expanded.values)])
    merged, change = merge(kept, [*_offsets(expanded), *indices_of(expanded.values)])
    return merged, with_axes(expanded, change, merged, others)


def _offsets(expanded: Expanded) -> list[sympy.Expr]:
    return [write.offset for write in expanded.writes if not isinstance(write.offset, Expr)]
