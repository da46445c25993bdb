"""Counts how often a kernel evaluates the members of a cluster: at how many points, in how many programs.

Input: a cluster of a Program; output: numbers of evaluations, for sizes as they were traced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.indexing import Sizes
from fusion.lowering.ir.expr import Expr, Index, Random, free_axes, postorder
from fusion.lowering.ir.program import Contract, Map, Reduce
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.clusters.work import factors_of, is_bounded, is_split_window
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import place

MOST_COPIES = 64
"""The most indices of one member that are distinguished."""


class Evaluations:
    """Counts the evaluations of members of clusters of one Program on one target."""

    def __init__(self, dependences: Dependences, capabilities: Capabilities) -> None:
        self.dependences, self.capabilities = dependences, capabilities

    def copies(self, cluster: Cluster) -> Mapping[int, int]:
        """Return how often a kernel evaluates members at one point: once for each index at which others read them.

        Members that the mapping lacks are evaluated once; at most `MOST_COPIES` indices are distinguished.
        """
        inside = {self.dependences.outs[member]: member for member in cluster.places}
        read: dict[int, dict[tuple[Index, ...], None]] = {}
        for member in reversed(cluster.members):  # readers come before their producers
            if member not in cluster.places:
                continue
            node, placement = self.dependences.compute(member), cluster.places[member]
            own = tuple(placement[axis.symbol] for axis in node.axes)
            at = read.get(member, {}) if isinstance(node, Map) else {}  # a fold is computed where it is placed
            read[member] = at = at or {own: None}
            inner = [load for load in self.dependences.loads[member] if load.buffer in inside]
            for index in at if inner and len(at) <= MOST_COPIES else ():
                moved = {**placement, **dict(zip((axis.symbol for axis in node.axes), index, strict=True))}
                for load in inner:
                    there = tuple(_moved(part, moved, cluster.space.sizes) for part in load.index)
                    read.setdefault(inside[load.buffer], {})[there] = None
        return {member: min(len(at), MOST_COPIES) for member, at in read.items() if len(at) > 1}

    def points(
        self,
        cluster: Cluster,
        spanned: Collection[sympy.Symbol],
        sizes: Mapping[sympy.Symbol, int],
        lanes: sympy.Symbol | None,
    ) -> int:
        """Return how many points of a member a kernel evaluates.

        A kernel without reductions has a loop for each axis: it computes a value in the loop over the last axis that
        this spans, at each point of those around it, unless it spans the last axis alone: then it is in a register or
        in a table.  One with reductions computes the elements of a row for each row, unless its lanes are columns, or
        it multiplies few rows by many columns: both factors are then computed once.
        """
        space, around = cluster.space, set[sympy.Symbol]()
        if space.reduced and not space.rigid:
            inside = space.held.union(axis.symbol for axis in space.reduced)
            if lanes is None and not inside.isdisjoint(spanned) and not self._multiplies_few_rows(cluster):
                around = {axis.symbol for axis in space.parallel} - space.held
        elif space.parallel and not space.rigid and len(spanned) > 1 and space.parallel[-1].symbol in spanned:
            around = {axis.symbol for axis in space.parallel}
        return math.prod(sizes[s] for s in around.union(spanned))

    def _multiplies_few_rows(self, cluster: Cluster) -> bool:
        """Return whether a cluster has a sum of products with few rows (a skinny GEMM)."""
        few = self.capabilities.few_rows
        if not few:
            return False
        for member in cluster.places:
            node = self.dependences.compute(member)
            factors = factors_of(node) if isinstance(node, Reduce) else None
            if factors is None:
                continue
            wide = {axis.symbol: self.dependences.estimate(axis.size) for axis in node.axes if axis.size != 1}
            rows, columns = ({*free_axes(side)} & wide.keys() for side in factors)
            if not rows & columns and min(math.prod(wide[axis] for axis in side) for side in (rows, columns)) <= few:
                return True
        return False

    def drawn_again(self, cluster: Cluster) -> dict[int, float]:
        """Return the additions of random numbers that another member at the same points draws as well.

        A kernel draws each number once.
        """
        drawn = set[tuple[Expr, tuple[object, ...]]]()
        again: dict[int, float] = {}
        for member, placement in cluster.places.items():
            node = self.dependences.compute(member)
            at = tuple(placement[axis.symbol] for axis in node.axes)
            for part in postorder(*node.exprs):
                if isinstance(part, Random) and (part, at) in drawn:
                    again[member] = again.get(member, 0.0) + self.capabilities.rates.cost_of(part)
                elif isinstance(part, Random):
                    drawn.add((part, at))
        return again

    def lanes(self, cluster: Cluster) -> sympy.Symbol | None:
        """Return the axis of the results along which a sum is vectorised, whose columns are consecutive in a factor;
        None if it is vectorised along the summed axis.
        """
        if cluster.space.rigid or not cluster.space.parallel or not cluster.space.reduced:
            return None
        columns = cluster.space.parallel[-1].symbol
        for member, placement in cluster.places.items():
            node = self.dependences.compute(member)
            for load in self.dependences.loads[member] if isinstance(node, Reduce) else ():
                buffer = self.dependences.program.buffers[load.buffer]
                along = (part for part, stride in zip(load.index, buffer.strides, strict=True) if stride == 1)
                if any(
                    isinstance(part, sympy.Expr) and columns in part.xreplace(dict(placement)).free_symbols
                    for part in along
                ):
                    return columns
        return None

    def split_windows(self, cluster: Cluster) -> frozenset[sympy.Basic]:
        """Return the axes of a cluster along which windows are folded that lanes cannot read as they are."""
        axes = set[sympy.Basic]()
        for member, placement in cluster.places.items():
            node = self.dependences.compute(member)
            if isinstance(node, Reduce) and is_split_window(self.dependences.program, node):
                axes.update(*(placement[axis.symbol].free_symbols for axis in node.over))
        return frozenset(axes)

    def in_windows(self, cluster: Cluster, windows: frozenset[sympy.Basic]) -> float:
        """Return the factor of operations on elements of short windows along these axes.

        Lanes read neighbours of one tensor from the first result to the last whose element counts.  Elements of several
        tensors, as of an image and of the channels that scale it, are loaded one by one, each under its condition.
        """
        steps, inside = self.capabilities.rates.steps, {self.dependences.outs[member] for member in cluster.members}
        read, bounded = set[str](), False
        for member, placement in cluster.places.items():
            node = self.dependences.compute(member)
            bounded |= isinstance(node, Reduce) and is_bounded(self.dependences.program, node)
            if any(not windows.isdisjoint(index.free_symbols) for index in placement.values()):
                read |= {load.buffer for load in self.dependences.loads[member]} - inside
        return steps.one_by_one if bounded and len(read) > 1 else steps.evaluated

    def by_tiles(self, cluster: Cluster, spanned: Collection[sympy.Symbol]) -> int:
        """Return how many programs evaluate each point of a member that spans these axes.

        A program computes a tile of `ProductTiles.side` rows and columns, or all columns of a chain.  A value is
        evaluated once for each tile along the axes of rows or columns that it does not span, and for each point of the
        other axes.  A value per point of the result is evaluated once.
        """
        parallel = {axis.symbol: self.dependences.estimate(axis.size) for axis in cluster.space.parallel}
        apart = parallel.keys() - spanned - cluster.space.held
        sides = [side - cluster.space.held for side in self._sides(cluster)]
        length = self.capabilities.tiles.side
        tiles = [math.ceil(math.prod(parallel[axis] for axis in side & apart) / length) for side in sides]
        others = apart.difference(*sides)
        return math.prod(tiles) * math.prod(parallel[axis] for axis in others)

    def after_outer_loop(self, cluster: Cluster) -> frozenset[int]:
        """Return the members that are computed after the outer loop of a cluster, from folds over it."""
        after: set[int] = set()
        for member in cluster.members if cluster.space.outer else ():
            placement, node = cluster.places.get(member), self.dependences.compute(member)
            folded = () if placement is None else (placement[axis.symbol].free_symbols for axis in node.over)
            crosses = any(not cluster.space.outer.isdisjoint(symbols) for symbols in folded)
            if crosses or not after.isdisjoint(self.dependences.producers(member)):
                after.add(member)
        return frozenset(after)

    def axes_of_tiles(self, cluster: Cluster) -> frozenset[sympy.Symbol]:
        """Return the axes of a tile of a product: of its rows, its columns and its sums; of a chain all axes."""
        space = cluster.space
        if space.chained:
            return frozenset(space.sizes)
        return frozenset[sympy.Symbol]().union(*self._sides(cluster), (axis.symbol for axis in space.reduced))

    def _sides(self, cluster: Cluster) -> tuple[frozenset[sympy.Symbol], frozenset[sympy.Symbol]]:
        """Return (the axes of the rows, the axes of the columns) of a cluster's contractions."""
        rows, columns = set[sympy.Symbol](), set[sympy.Symbol]()
        for member, placement in cluster.places.items():
            node = self.dependences.compute(member)
            if isinstance(node, Contract):
                rows.update(*(placement[axis].free_symbols for axis in node.rows))
                columns.update(*(placement[axis].free_symbols for axis in node.columns))
        parallel = {axis.symbol for axis in cluster.space.parallel}
        return frozenset(rows & parallel), frozenset(columns & parallel - rows)


def _moved(part: Index, placement: Mapping[sympy.Symbol, Index], sizes: Sizes) -> Index:
    """Return a part of an index in the axes of a cluster; data-dependent indices stay unchanged."""
    if isinstance(part, Expr):
        return part
    known = {axis: there for axis, there in placement.items() if not isinstance(there, Expr)}
    return place(part, known, sizes) if len(known) == len(placement) else part
