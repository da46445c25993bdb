"""Builds the axes and the body of a kernel that loops over tiles which it computes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy

from fusion.lowering.ir.expr import Expr, Index, Load, free_axes, postorder
from fusion.lowering.ir.kernel import KernelAxis, Role, Stmt
from fusion.lowering.ir.program import Axis
from fusion.schedule.chained.place_producers import LONGEST_HELD_AXIS
from fusion.schedule.clusters.expand import Expanded
from fusion.schedule.clusters.legality import Cluster, SeveralLoops
from fusion.schedule.iteration.axes import drop_ones
from fusion.schedule.kernels.axes import canonical, with_axes
from fusion.schedule.reductions.one_loop import one_loop


def chained_body(
    cluster: Cluster, expanded: Expanded, *, added: bool
) -> tuple[tuple[KernelAxis, ...], tuple[Stmt, ...]]:
    """Return the axes and the body of a kernel that loops over tiles which it computes itself; see `one_loop`.

    Raises:
        SeveralLoops: with maps that joined the chain since, folds have no online form any more.
    """
    space = cluster.space
    grid, more = drop_ones(space.spread)
    around = tuple(axis for axis in space.parallel if axis.symbol in space.outer)
    held = (axis for axis in space.parallel if axis.symbol in space.held)
    inner, count = (*around, *space.reduced, *space.private, *held), len(around) + len(space.reduced)
    same = _one_axis(expanded, inner[count:])
    expanded = _with_names(with_axes(expanded, {**more, **same}, grid, inner), same)
    inner = tuple(axis for axis in inner if axis.symbol not in same)
    kept = sum(axis.symbol not in same for axis in space.private)
    grid, inner, expanded = canonical(grid, inner, expanded)
    around, looped = inner[: len(around)], inner[len(around) : count]
    private = inner[count : count + kept]
    long = tuple(axis for axis in private if not axis.size.is_Integer or axis.size > LONGEST_HELD_AXIS)
    loops = {axis.symbol for axis in (*around, *looped, *long)}
    axes = (
        *(KernelAxis(axis.symbol, axis.size, Role.GRID) for axis in grid),
        *(KernelAxis(axis.symbol, axis.size, Role.LOOP if axis.symbol in loops else Role.WHOLE) for axis in inner),
    )
    nest = [[axis.symbol for axis in axes] for axes in (looped, long, around)]
    body = one_loop(expanded, *nest, added=added)
    if isinstance(body, str):
        raise SeveralLoops(body)
    return axes, body


def _one_axis(expanded: Expanded, axes: Sequence[Axis]) -> dict[sympy.Symbol, sympy.Symbol]:
    """Return axes to rename to another one, so that folds that read the same tile load it once.

    The columns of one contraction may be the reduced axis of another, if no fold has both.
    """
    roots = [*(arg for fold in expanded.folds for arg in fold.args)]
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    axes_of_folds = [free_axes(*fold.args).union(fold.over, fold.rows, fold.columns) for fold in expanded.folds]
    loaded = {node for node in postorder(*roots) if isinstance(node, Load)}
    for k, axis in enumerate(axes):
        for other in axes[k + 1 :]:
            taken = axis.symbol in names or other.symbol in names or axis.symbol in names.values()
            if taken or axis.size != other.size or any({axis.symbol, other.symbol} <= known for known in axes_of_folds):
                continue
            renamed = {load for load in loaded if other.symbol in free_axes(load)}
            moved = {Load(n.buffer, tuple(_renamed(i, other, axis) for i in n.index), n.dtype, n.mask) for n in renamed}
            if moved & loaded:
                names[other.symbol] = axis.symbol
    return names


def _with_names(expanded: Expanded, names: Mapping[sympy.Symbol, sympy.Symbol]) -> Expanded:
    """Rename the axes that folds reduce and keep."""

    def called(symbols: tuple[sympy.Symbol, ...]) -> tuple[sympy.Symbol, ...]:
        return tuple(dict.fromkeys(names.get(symbol, symbol) for symbol in symbols))

    folds = (
        replace(fold, over=called(fold.over), rows=called(fold.rows), columns=called(fold.columns))
        for fold in expanded.folds
    )
    return replace(expanded, folds=tuple(folds))


def _renamed(index: Index, old: Axis, new: Axis) -> Index:
    return index if isinstance(index, Expr) else index.xreplace({old.symbol: new.symbol})
