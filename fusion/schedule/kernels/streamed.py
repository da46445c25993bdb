"""The axes and the body of a kernel that makes tiles and walks them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy

from fusion.lowering.expr import Expr, Index, Load, free_axes, postorder
from fusion.lowering.kernel import KernelAxis, Role, Stmt
from fusion.lowering.program import Axis
from fusion.schedule.chained.place_producers import HELD
from fusion.schedule.clusters.expand import Expanded
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.iteration.axes import drop_ones
from fusion.schedule.kernels.settle import canonical, with_axes
from fusion.schedule.reductions.walks import walk


def streamed_body(cluster: Cluster, expanded: Expanded) -> tuple[tuple[KernelAxis, ...], tuple[Stmt, ...]]:
    """The axes and the body of a kernel that makes tiles and walks them at once."""
    space = cluster.space
    grid, more = drop_ones([axis for axis in space.parallel if axis.symbol not in space.held])
    inner = (*space.reduced, *space.private, *(axis for axis in space.parallel if axis.symbol in space.held))
    same = _one_axis(expanded, inner[len(space.reduced) :])
    expanded = _called(with_axes(expanded, {**more, **same}, grid, inner), same)
    inner = tuple(axis for axis in inner if axis.symbol not in same)
    kept = sum(axis.symbol not in same for axis in space.private)
    grid, inner, expanded = canonical(grid, inner, expanded)
    walked = inner[: len(space.reduced)]
    private = inner[len(walked) : len(walked) + kept]
    long = tuple(axis for axis in private if not axis.size.is_Integer or axis.size > HELD)
    loops = {axis.symbol for axis in (*walked, *long)}
    axes = (
        *(KernelAxis(axis.symbol, axis.size, Role.GRID) for axis in grid),
        *(KernelAxis(axis.symbol, axis.size, Role.LOOP if axis.symbol in loops else Role.WHOLE) for axis in inner),
    )
    body = walk(expanded, [axis.symbol for axis in walked], [axis.symbol for axis in long])
    assert not isinstance(body, str), f"a stream that does not run in one walk was not refused: {body}"
    return axes, body


def _one_axis(expanded: Expanded, axes: Sequence[Axis]) -> dict[sympy.Symbol, sympy.Symbol]:
    """Axes to be called by the name of another one, so that folds which read the same tile load it once.

    The columns of one contraction may be what another one runs over, as long as no fold knows both.
    """
    roots = [*(arg for fold in expanded.folds for arg in fold.args)]
    found: dict[sympy.Symbol, sympy.Symbol] = {}
    together = [free_axes(*fold.args).union(fold.over, fold.rows, fold.columns) for fold in expanded.folds]
    loaded = {node for node in postorder(*roots) if isinstance(node, Load)}
    for k, axis in enumerate(axes):
        for other in axes[k + 1 :]:
            taken = axis.symbol in found or other.symbol in found or axis.symbol in found.values()
            if taken or axis.size != other.size or any({axis.symbol, other.symbol} <= known for known in together):
                continue
            renamed = {load for load in loaded if other.symbol in free_axes(load)}
            moved = {Load(n.buffer, tuple(_renamed(i, other, axis) for i in n.index), n.dtype, n.mask) for n in renamed}
            if moved & loaded:
                found[other.symbol] = axis.symbol
    return found


def _called(expanded: Expanded, names: Mapping[sympy.Symbol, sympy.Symbol]) -> Expanded:
    """`expanded` with other names for what its folds run over and keep."""

    def called(symbols: tuple[sympy.Symbol, ...]) -> tuple[sympy.Symbol, ...]:
        return tuple(dict.fromkeys(names.get(symbol, symbol) for symbol in symbols))

    folds = (
        replace(fold, over=called(fold.over), rows=called(fold.rows), columns=called(fold.columns))
        for fold in expanded.folds
    )
    return replace(expanded, folds=tuple(folds))


def _renamed(index: Index, old: Axis, new: Axis) -> Index:
    return index if isinstance(index, Expr) else index.xreplace({old.symbol: new.symbol})
