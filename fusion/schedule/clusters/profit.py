"""Predicts whether one kernel is faster than two.

A cluster's time is a `Price`: memory and arithmetic, which overlap, and a launch.  Traffic counts every outside tensor
once, and the excess traffic of a reduction that loads along one axis and stores along another (`crossing.py`);
arithmetic counts every node at every point where it is evaluated, so recomputation has its price.  The constants come
from the target.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import TypeAlias

import sympy
import torch

from fusion.codegen.price import Price
from fusion.codegen.target import Capabilities
from fusion.lowering.expr import Expr, Index, free_axes, loads
from fusion.lowering.indexing import Sizes, flatten
from fusion.lowering.program import Contract, Map, Reduce, Scatter, axis_sizes
from fusion.schedule.clusters.crossing import Crossings
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.clusters.misaligned_rows import is_odd, share_of_library
from fusion.schedule.clusters.work import additions_in_tiles, additions_per_point, factors_of, is_split_window
from fusion.schedule.iteration.contiguity import SCATTERED, is_scattered
from fusion.schedule.iteration.contractions import slowdown
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import place

CONTRACTION_TILE = 128
"""Rows and columns of a contraction's tile."""

EARLY = 1 << 22
"""Bytes that a kernel may compute long before they are needed, to share a launch: they are live that long."""


NARROW = (torch.float16, torch.bfloat16)

MOST_COPIES = 64
"""The most indices of one member that are told apart."""


ChainedShare: TypeAlias = "Callable[[Prices, Cluster], float]"
"""Returns the efficiency of the contractions of a chain, relative to the library's; see `kernels/time.py`."""


class Prices:
    """Predicted times, in microseconds, of clusters of one Program on one target.

    Args:
        chained_share: returns the efficiency of a chain; without it, it is the same for all chains of a target.
    """

    def __init__(
        self, dependences: Dependences, capabilities: Capabilities, chained_share: ChainedShare | None = None
    ) -> None:
        self.dependences = dependences
        self.capabilities, self.rates = capabilities, capabilities.rates
        self.chained_share: ChainedShare = chained_share or (lambda prices, cluster: capabilities.streamed)
        self._crossings = Crossings(dependences, capabilities.sector)
        self.times: dict[tuple[int, ...], float] = {}  # members → predicted time, of clusters that were formed

    @cached_property
    def work(self) -> list[float]:
        """Additions per point of each node."""
        program = self.dependences.program
        return [additions_per_point(program, node, self.rates) for node in program.nodes]

    @cached_property
    def work_in_tiles(self) -> list[float]:
        """Additions per point of each node in a kernel of products, where no memory time hides other arithmetic."""
        program = self.dependences.program
        return [additions_in_tiles(program, node, self.rates) for node in program.nodes]

    @cached_property
    def _places(self) -> list[dict[str, int]]:
        """The number of elements of each buffer that a node loads for one point, such as those of a window."""
        distinct = (dict.fromkeys((load.buffer, load.index) for load in loaded) for loaded in self.dependences.loads)
        return [Counter(buffer for buffer, _ in places) for places in distinct]

    def worth(self, first: Cluster, second: Cluster, joined: Cluster) -> str | None:
        """Return None if `joined` is predicted to be no slower than both separately; else why not."""
        separately = 0.0
        for side in (first, second):
            if side.members not in self.times:
                self.times[side.members] = self.time(side)
            separately += self.times[side.members]
        together = self.time(joined)
        if together <= separately:
            self.times[joined.members] = together
            return None
        return f"together it would take longer ({together:.1f} µs against {separately:.1f} µs)"

    def time(self, cluster: Cluster) -> float:
        """Return the predicted microseconds of one launch of `cluster`, launch overhead included."""
        return self.price(cluster).total

    def price(self, cluster: Cluster) -> Price:
        """Return the predicted microseconds of one launch of `cluster`, by part."""
        moved = self.moved(cluster)
        scalars = sum(self.scalar_times(cluster).values())
        return self.rates.price(moved, products=self._products(cluster), scalars=scalars, share=self._busy(cluster))

    def moved(self, cluster: Cluster) -> int:
        """Return the bytes that one launch of `cluster` moves, with memory requests for single elements."""
        return sum(self.traffic(cluster)) + self._crossings.excess(cluster) + self._scattered(cluster)

    def _scattered(self, cluster: Cluster) -> int:
        """Return the bytes in excess of operands of products that are contiguous along no axis of a tile.

        Every element is a memory request, once for each tile that multiplies it: a copy of the operand is read in rows.
        """
        if not self.capabilities.sector or not cluster.space.rigid:
            return 0
        sizes, inside = cluster.space.sizes, {self.dependences.outs[member] for member in cluster.members}
        excess = 0
        for member, placement in cluster.places.items():
            node_sizes = axis_sizes(self.dependences.compute(member))
            for load in self.dependences.loads[member]:
                buffer = self.dependences.program.buffers[load.buffer]
                offset = flatten(load.index, buffer.strides, node_sizes)
                if load.buffer in inside or isinstance(offset, Expr) or self.dependences.bytes(load.buffer) < SCATTERED:
                    continue
                placed = place(offset, placement, sizes)
                if not is_scattered(placed, sizes):
                    continue
                spanned = placed.free_symbols & sizes.keys()
                points = math.prod(self.dependences.estimate(sizes[axis]) for axis in spanned)
                excess += (
                    points * self._evaluations(cluster, spanned) * (self.capabilities.sector - buffer.dtype.itemsize)
                )
        return excess

    def traffic(self, cluster: Cluster) -> tuple[int, int]:
        """Return the bytes (read, written): every tensor from outside once, every stored result once."""
        together = frozenset(cluster.members)
        outs = {self.dependences.outs[m] for m in cluster.members}
        outside = set[str]().union(*(self.dependences.read[m] for m in cluster.members)) - outs
        written = sum(self._written(m) for m in cluster.members if self._stored(m, together))
        points = self.dependences.estimate(cluster.space.points)
        read = 0
        for name in outside:  # a load reads no more than one element per point
            each = max(self._places[m].get(name, 1) for m in cluster.members)
            read += min(
                self.dependences.bytes(name), points * each * self.dependences.program.buffers[name].dtype.itemsize
            )
        return read, written

    def _stored(self, member: int, together: frozenset[int]) -> bool:
        return isinstance(self.dependences.node(member), Scatter) or self.dependences.stored(member, together)

    def _written(self, member: int) -> int:
        """Return the bytes that a member writes; an update also reads its elements."""
        node = self.dependences.compute(member)
        if not isinstance(node, Scatter):
            return self.dependences.bytes(node.out)
        points = math.prod(self.dependences.estimate(axis.size) for axis in node.axes)
        return points * node.value.dtype.itemsize * (1 if node.op == "store" else 2)

    def _busy(self, cluster: Cluster) -> float:
        """Return the occupancy of a reduction, as a share of the device: one program computes one row."""
        if not cluster.space.reduced or cluster.space.rigid:
            return 1.0
        spread = (axis for axis in cluster.space.parallel if axis.symbol not in cluster.space.held)
        rows = math.prod(self.dependences.estimate(axis.size) for axis in spread)
        if cluster.space.crossed:  # one program to a multiprocessor holds as much as its registers can
            slots = self.capabilities.parallelism // 2
            return rows / (slots * -(-rows // slots))
        return min(1.0, max(1, rows) / self.capabilities.parallelism)

    def _products(self, cluster: Cluster) -> float:
        shared = 1.0 if cluster.space.streamed else slowdown(self.dependences, cluster.members)
        multiplied = 0.0
        for member in cluster.members:
            node = self.dependences.compute(member)
            if isinstance(node, Contract):
                odd = not cluster.space.streamed and self._odd(cluster, node)
                multiplied += self.contraction(cluster, node) / (self.capabilities.odd_rows.product if odd else 1.0)
        return multiplied * shared

    def scalar_times(self, cluster: Cluster) -> dict[int, float]:
        """Return the microseconds of the scalar units for each member that is no contraction."""
        sizes = {s: self.dependences.estimate(n) for s, n in cluster.space.sizes.items()}
        inside = {self.dependences.outs[m]: m for m in cluster.members}
        points: dict[int, int] = {}
        evaluated: dict[int, float] = {}
        windows, lanes = self._split_windows(cluster), self._lanes(cluster)
        copies = self.copies(cluster)
        times: dict[int, float] = {}
        folded = {axis.symbol for axis in cluster.space.reduced}
        for member in reversed(cluster.members):  # readers come before their producers
            placement = cluster.places.get(member)
            if placement is None:
                points[member] = max(points.get(member, 1), 1)
            else:
                spanned = {s for expr in placement.values() for s in expr.free_symbols if s in sizes}
                points[member] = max(points.get(member, 1), self._points(cluster, spanned, sizes, lanes))
                evaluated[member] = self._evaluations(cluster, spanned) if cluster.space.rigid else 1
                evaluated[member] *= 1 if windows.isdisjoint(spanned) else self.rates.steps.evaluated
                if lanes is not None and lanes not in spanned and not spanned.isdisjoint(folded):
                    evaluated[member] *= self.rates.steps.shared
            if isinstance(self.dependences.node(member), Contract):
                continue
            work = self.work_in_tiles if cluster.space.rigid else self.work
            additions = work[member] * evaluated.get(member, 1) + self._conversions(member, inside)
            times[member] = self.rates.scalar_us(additions * points[member] * copies.get(member, 1))
            for load in self.dependences.loads[member]:
                producer = inside.get(load.buffer)
                if producer is not None and producer not in cluster.places:
                    points[producer] = points.get(producer, 0) + points[member]
                    evaluated[producer] = max(evaluated.get(producer, 1), evaluated.get(member, 1))
        return times

    def _conversions(self, member: int, inside: Mapping[str, int]) -> float:
        """Return the additions in which one point of a member converts 16-bit floats that are loaded and stored."""
        steps, program = self.rates.steps, self.dependences.program
        node = self.dependences.compute(member)
        if not (steps.widened or steps.narrowed):
            return 0.0
        multiplies = isinstance(node, Reduce) and factors_of(node) is not None  # at a rate that includes them
        read = () if multiplies else (name for name in self._places[member] if name not in inside)
        loaded = sum(self._places[member][name] for name in read if program.buffers[name].dtype in NARROW)
        stored = self._stored(member, frozenset(inside.values()))
        narrow = program.buffers[self.dependences.outs[member]].dtype in NARROW
        return steps.widened * loaded + (steps.narrowed if stored and narrow else 0.0)

    def copies(self, cluster: Cluster) -> Mapping[int, int]:
        """Return how often a kernel evaluates members at one point: once for each index at which others read them.

        Members that the mapping lacks are evaluated once; at most `MOST_COPIES` indices are told apart.
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

    def _points(
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
        """Return whether a cluster's only sums over its columns are products of few rows with them."""
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

    def _lanes(self, cluster: Cluster) -> sympy.Symbol | None:
        """Return the axis of the results along which the lanes of a sum lie: columns that are consecutive in a factor;
        None if they lie along the sum.
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

    def _split_windows(self, cluster: Cluster) -> frozenset[sympy.Basic]:
        """Return the axes of a cluster along which windows are folded that lanes cannot read as they are."""
        axes = set[sympy.Basic]()
        for member, placement in cluster.places.items():
            node = self.dependences.compute(member)
            if isinstance(node, Reduce) and is_split_window(self.dependences.program, node):
                axes.update(*(placement[axis.symbol].free_symbols for axis in node.over))
        return frozenset(axes)

    def contraction(self, cluster: Cluster, node: Contract) -> float:
        """Return the microseconds of a contraction on the matrix units at the library's speed, for aligned rows."""
        points = math.prod(self.dependences.estimate(axis.size) for axis in (*node.axes, *node.over))
        share = self.chained_share(self, cluster) if cluster.space.streamed else 1.0
        return self.rates.product_us_of(2 * points, node.lhs.dtype.itemsize) / share

    def by_library(self, cluster: Cluster, node: Contract) -> float:
        """Return the microseconds of the library's product on the matrix units, with the packing of its operands."""
        share, program = 1.0, self.dependences.program
        if self.capabilities.alignment > 1:
            calls, shares = program.library.get(node.out, ()), self.capabilities.odd_rows.library
            share = share_of_library(calls, program.buffers, shares)
        return self.contraction(cluster, node) / share + self.packing(node, library=True)

    def packing(self, node: Contract, *, library: bool = False) -> float:
        """Return the microseconds in which the operands of a product are brought into the order that blocks read."""
        operands, steps = sum(self.dependences.bytes(load.buffer) for load in loads(*node.exprs)), self.rates.steps
        return self.rates.scalar_us((steps.packed_by_library if library else steps.packed) * operands)

    def _odd(self, cluster: Cluster, node: Contract) -> bool:
        """Return whether a contraction reads misaligned rows, itself or through members of its cluster."""
        inside = {self.dependences.outs[m]: m for m in cluster.members}
        pending, seen = [*loads(*node.exprs)], set[str]()
        while pending:
            load = pending.pop()
            if load.buffer in seen:
                continue
            seen.add(load.buffer)
            if load.buffer in inside:
                pending += self.dependences.loads[inside[load.buffer]]
            elif is_odd(self.dependences.program.buffers[load.buffer]):
                return True
        return False

    def _evaluations(self, cluster: Cluster, spanned: Collection[sympy.Symbol]) -> int:
        """Return how many programs evaluate each point of a member that spans these axes.

        A program computes a tile of `CONTRACTION_TILE` rows and columns, or all columns of a chain.  A value is
        evaluated once for each tile along the axes of rows or columns that it does not span, and for each point of the
        other axes.  A value per point of the result is evaluated once.
        """
        parallel = {axis.symbol: self.dependences.estimate(axis.size) for axis in cluster.space.parallel}
        apart = parallel.keys() - spanned - cluster.space.held
        sides = [side - cluster.space.held for side in self._sides(cluster)]
        tiles = [math.ceil(math.prod(parallel[axis] for axis in side & apart) / CONTRACTION_TILE) for side in sides]
        others = apart.difference(*sides)
        return math.prod(tiles) * math.prod(parallel[axis] for axis in others)

    def _sides(self, cluster: Cluster) -> tuple[frozenset[sympy.Symbol], frozenset[sympy.Symbol]]:
        """Return the axes of the rows, and of the columns, of a cluster's contractions."""
        rows, columns = set[sympy.Symbol](), set[sympy.Symbol]()
        for member, placement in cluster.places.items():
            node = self.dependences.compute(member)
            if isinstance(node, Contract):
                rows.update(*(placement[axis].free_symbols for axis in node.rows))
                columns.update(*(placement[axis].free_symbols for axis in node.columns))
        parallel = {axis.symbol for axis in cluster.space.parallel}
        return frozenset(rows & parallel), frozenset(columns & parallel - rows)

    def flops(self, cluster: Cluster) -> int:
        """Return the scalar operations, in additions as they are priced, and multiply-adds (two each) of one launch."""
        sizes = {s: self.dependences.estimate(n) for s, n in cluster.space.sizes.items()}
        if not cluster.space.rigid:
            return round(self.rates.flops * sum(self.scalar_times(cluster).values()))
        total = 0.0
        for member, placement in cluster.places.items():
            node = self.dependences.compute(member)
            spanned = {s for expr in placement.values() for s in expr.free_symbols if s in sizes}
            points = math.prod(sizes[s] for s in spanned)
            total += points * (2 if isinstance(node, Contract) else self.work[member])
        return round(total)


def _moved(part: Index, placement: Mapping[sympy.Symbol, Index], sizes: Sizes) -> Index:
    """Return a part of an index in the axes of a cluster; parts that depend on data are distinguished as they are."""
    if isinstance(part, Expr):
        return part
    known = {axis: there for axis, there in placement.items() if not isinstance(there, Expr)}
    return place(part, known, sizes) if len(known) == len(placement) else part
