"""Determines the axes of a kernel: merged where all accesses allow it, in memory order, with canonical names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.indexing import axis_symbol, over_symbol, simplify
from fusion.lowering.ir.expr import Expr, TileRef, free_axes, loads, postorder
from fusion.lowering.ir.kernel import Role
from fusion.lowering.ir.program import Axis
from fusion.lowering.value import contiguous_strides
from fusion.schedule.clusters.expand import Expanded
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.iteration.axes import accesses_of, drop_ones, indices_of, merge, order_by_stride, replace_in
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.reductions.one_loop import follow


def kernel_axes(
    cluster: Cluster, expanded: Expanded, *, reorders: bool = True
) -> tuple[tuple[Axis, ...], tuple[Axis, ...], Expanded]:
    """Return the parallel and the reduced axes of a kernel, merged and in order, and the expansion over them.

    Without `reorders` the reduced axes stay in the order of the fold, which then adds in that order in any kernel.
    """
    parallel, reduced = cluster.space.parallel, cluster.space.reduced
    if cluster.space.rigid:
        return parallel, reduced, expanded
    parallel, ones = drop_ones(parallel)
    reduced, more_ones = drop_ones(reduced)
    if cluster.space.reduced and not reduced:  # a fold over one element is still a fold
        reduced = cluster.space.reduced[-1:]
        more_ones.pop(reduced[0].symbol)
    expanded = with_axes(expanded, {**ones, **more_ones}, parallel, reduced)
    values = (*expanded.values, *expanded.offsets)
    offsets = [write.offset for write in expanded.writes if not isinstance(write.offset, Expr)]
    accesses = [*offsets, *accesses_of(values)]
    parallel = order_by_stride(parallel, accesses)
    reduced = order_by_stride(reduced, accesses_of(values)) if reorders else tuple(reduced)
    indices = [*offsets, *indices_of(values), *_points(expanded, parallel)]
    parallel, change = merge(parallel, indices)
    expanded = with_axes(expanded, change, parallel, reduced)
    values = (*expanded.values, *expanded.offsets)
    offsets = [write.offset for write in expanded.writes if not isinstance(write.offset, Expr)]
    reduced, change = merge(reduced, [*offsets, *indices_of(values), *_points(expanded, reduced)])
    expanded = with_axes(expanded, change, parallel, reduced)
    over = tuple(axis.symbol for axis in reduced)
    return parallel, reduced, replace(expanded, folds=tuple(replace(fold, over=over) for fold in expanded.folds))


def _points(expanded: Expanded, axes: Sequence[Axis]) -> list[sympy.Expr]:
    """Return for each scatter the row-major number of its point, along the axes in `axes` over which it runs."""
    numbers: list[sympy.Expr] = []
    for write in expanded.writes:
        symbols = {symbol for point in write.points or () for symbol in point.free_symbols}
        own = [axis for axis in axes if axis.symbol in symbols]
        strides = contiguous_strides(tuple(axis.size for axis in own))
        numbers.append(sympy.Add(*(axis.symbol * stride for axis, stride in zip(own, strides, strict=True))))
    return numbers


def with_axes(
    expanded: Expanded, change: Mapping[sympy.Symbol, sympy.Expr], parallel: Sequence[Axis], reduced: Sequence[Axis]
) -> Expanded:
    """Replace axes everywhere in an expansion."""
    if not change:
        return expanded
    sizes = {axis.symbol: axis.size for axis in (*parallel, *reduced)}
    roots, offsets = replace_in(expanded.values, [write.offset for write in expanded.writes], change, sizes)
    rest = iter(roots)
    folds = tuple(replace(fold, args=tuple(next(rest) for _ in fold.args)) for fold in expanded.folds)
    prefixes = tuple(replace(scan, args=tuple(next(rest) for _ in scan.args)) for scan in expanded.prefixes)
    values = [next(rest) for _ in expanded.writes]
    writes = tuple(
        replace(
            write,
            offset=offset,
            value=value,
            points=None if write.points is None else tuple(simplify(p.xreplace(change), sizes) for p in write.points),
            where=None if write.where is None else next(rest),
        )
        for write, offset, value in zip(expanded.writes, offsets, values, strict=True)
    )
    return Expanded(folds, writes, prefixes)


def canonical(
    parallel: Sequence[Axis], reduced: Sequence[Axis], expanded: Expanded
) -> tuple[tuple[Axis, ...], tuple[Axis, ...], Expanded]:
    """Rename axes to `i0, i1, …` and `r0, r1, …`, in order."""
    new_parallel = tuple(Axis(axis_symbol(k), axis.size) for k, axis in enumerate(parallel))
    new_reduced = tuple(Axis(over_symbol(k), axis.size) for k, axis in enumerate(reduced))
    pairs = zip((*parallel, *reduced), (*new_parallel, *new_reduced), strict=True)
    names = {old.symbol: new.symbol for old, new in pairs if old.symbol != new.symbol}
    expanded = with_axes(expanded, names, new_parallel, new_reduced)

    known = {axis.symbol for axis in (*parallel, *reduced)}

    def renamed(symbols: tuple[sympy.Symbol, ...]) -> tuple[sympy.Symbol, ...]:
        return tuple(names.get(symbol, symbol) for symbol in symbols if symbol in known)  # others had size 1

    folds = tuple(
        replace(fold, over=renamed(fold.over), rows=renamed(fold.rows), columns=renamed(fold.columns))
        for fold in expanded.folds
    )
    prefixes = tuple(replace(scan, along=names.get(scan.along, scan.along)) for scan in expanded.prefixes)
    return new_parallel, new_reduced, replace(expanded, folds=folds, prefixes=prefixes)


_HELD_LOADS = 2
"""Loads of each element that a program holds of the longest row; where they are more, rows have to be shorter.

(measured: docs/performance.md, `_HELD_LOADS`)
"""


def role_of(
    capabilities: Capabilities, expanded: Expanded, cluster: Cluster, reduced: Sequence[Axis], dependences: Dependences
) -> Role:
    """Return the role of the reduced axes: WHOLE, or LOOP.

    Where nothing is padded, rows whose length is not known are taken as they were when the graph was traced.
    """
    length = sympy.Mul(*(axis.size for axis in reduced))
    if not capabilities.padded and length.free_symbols <= dependences.hints.keys():
        length = sympy.Mul(dependences.estimate(length))
    if capabilities.ordered and any(write.points is not None for write in expanded.writes):
        return Role.LOOP
    if cluster.space.rigid or not length.is_Integer or length > capabilities.whole_limit:
        return Role.LOOP
    if capabilities.invariant:
        return Role.WHOLE
    is_heavy = _loads_along(expanded, reduced) * length > _HELD_LOADS * capabilities.whole_limit
    if is_heavy and _is_read_once(expanded, reduced):
        return Role.LOOP
    is_long = 0 < capabilities.followed_limit < length
    return Role.LOOP if is_long and _is_followed(expanded, reduced) else Role.WHOLE


def _loads_along(expanded: Expanded, reduced: Sequence[Axis]) -> int:
    """Return the number of loads of each element of a row."""
    along = {axis.symbol for axis in reduced}
    return sum(not free_axes(load).isdisjoint(along) for load in {*loads(*expanded.values)})


def _is_read_once(expanded: Expanded, reduced: Sequence[Axis]) -> bool:
    """Return whether no fold and no write needs the row once more, after a fold."""
    return not _follows(expanded) and not _is_written_along(expanded, reduced)


def _is_followed(expanded: Expanded, reduced: Sequence[Axis]) -> bool:
    """Return whether folds need results of others, one loop computes all, and no write needs the row afterwards."""
    if not _follows(expanded) or expanded.prefixes or _is_written_along(expanded, reduced):
        return False
    return not isinstance(follow(expanded.folds, [axis.symbol for axis in reduced], ()), str)


def _follows(expanded: Expanded) -> bool:
    return any(isinstance(node, TileRef) for fold in expanded.folds for node in postorder(*fold.args))


def _is_written_along(expanded: Expanded, reduced: Sequence[Axis]) -> bool:
    along = {axis.symbol for axis in reduced}
    return any(along & free_axes(write.value) for write in expanded.writes)
