"""Predicts the bytes that one launch of a cluster moves.

Every outside tensor counts once; in addition count the excess traffic of a reduction that loads along one axis and
stores along another (`across_memory.py`), and of operands of products that are read element by element.  Input: a
cluster of a Program; output: bytes, for sizes as they were traced.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property

import sympy

from fusion.lowering.indexing import flatten
from fusion.lowering.ir.expr import Expr
from fusion.lowering.ir.program import Contract, Scatter, axis_sizes
from fusion.schedule.clusters.across_memory import Crossings
from fusion.schedule.clusters.evaluations import Evaluations
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.clusters.work import is_held
from fusion.schedule.iteration.contiguity import is_scattered, requests_per_element
from fusion.schedule.iteration.space import place


class ClusterTraffic:
    """Predicts the traffic of clusters of one Program on one target."""

    def __init__(self, evaluations: Evaluations) -> None:
        self.dependences, self.capabilities = evaluations.dependences, evaluations.capabilities
        self._evaluations = evaluations
        self._crossings = Crossings(self.dependences, self.capabilities.sector, self.capabilities.nearest)

    @cached_property
    def places(self) -> list[dict[str, int]]:
        """The number of elements of each buffer that a node loads for one point, such as those of a window."""
        distinct = (dict.fromkeys((load.buffer, load.index) for load in loaded) for loaded in self.dependences.loads)
        return [Counter(buffer for buffer, _ in places) for places in distinct]

    def moved(self, cluster: Cluster) -> int:
        """Return the bytes that one launch of `cluster` moves, with those of memory requests for single elements."""
        return sum(self.read_and_written(cluster)) + self._crossings.excess(cluster) + self._scattered(cluster)

    def _scattered(self, cluster: Cluster) -> int:
        """Return the bytes in excess of operands of products that are contiguous along no axis of a tile.

        Every element is a memory request, once for each tile that multiplies it, also where a cache answers it: a copy
        of the operand is read in rows.
        """
        if not self.capabilities.sector or not cluster.space.rigid:
            return 0
        sizes, inside = cluster.space.sizes, {self.dependences.outs[member] for member in cluster.members}
        hints, columns, excess = self.dependences.hints, self._columns(cluster), 0
        in_tiles = self._evaluations.axes_of_tiles(cluster)
        tile = {axis: size for axis, size in sizes.items() if axis in in_tiles}
        first = dict.fromkeys(sizes.keys() - tile.keys(), sympy.Integer(0))
        for member, placement in cluster.places.items():
            node_sizes = axis_sizes(self.dependences.compute(member))
            for load in self.dependences.loads[member]:
                buffer = self.dependences.program.buffers[load.buffer]
                offset = flatten(load.index, buffer.strides, node_sizes)
                if load.buffer in inside or isinstance(offset, Expr):
                    continue
                placed = place(offset, placement, sizes)
                within = placed.xreplace(first)
                if not is_scattered(within, tile, hints):
                    continue
                spanned = placed.free_symbols & sizes.keys()
                points = math.prod(self.dependences.estimate(sizes[axis]) for axis in spanned)
                times = points * self._evaluations.by_tiles(cluster, spanned)
                sector, itemsize = self.capabilities.sector, buffer.dtype.itemsize
                requests = times * requests_per_element(within, tile, columns, sector // itemsize, hints)
                excess += max(0, int(requests) * sector - times * itemsize)
        return excess

    def _columns(self, cluster: Cluster) -> set[sympy.Symbol]:
        """Return the axes along the columns of the first product in `cluster`."""
        for member, placement in cluster.places.items():
            node = self.dependences.compute(member)
            if isinstance(node, Contract):
                return {symbol for axis in node.columns for symbol in placement[axis].free_symbols}
        return set()

    def read_and_written(self, cluster: Cluster) -> tuple[int, int]:
        """Return the bytes (read, written): every tensor from outside once, every stored result once."""
        together = frozenset(cluster.members)
        outs = {self.dependences.outs[m] for m in cluster.members}
        outside = set[str]().union(*(self.dependences.read[m] for m in cluster.members)) - outs
        written = sum(self._written(m) for m in cluster.members if self.is_stored(m, together))
        points = self.dependences.estimate(cluster.space.points)
        read = 0
        for name in outside:  # a load reads no more than one element per point
            each = max(self.places[m].get(name, 1) for m in cluster.members)
            read += min(
                self.dependences.bytes(name), points * each * self.dependences.program.buffers[name].dtype.itemsize
            )
        return read, written

    def is_stored(self, member: int, together: frozenset[int]) -> bool:
        """Return whether a kernel of the members `together` stores the result of one of them."""
        return isinstance(self.dependences.node(member), Scatter) or self.dependences.stored(member, together)

    def _written(self, member: int) -> int:
        """Return the bytes that a member writes; an update also reads its elements, once if a cache keeps them.

        Updates in the order of a loop are a core's own; others are made where all cores see them.
        """
        node = self.dependences.compute(member)
        if not isinstance(node, Scatter):
            return self.dependences.bytes(node.out)
        points = math.prod(self.dependences.estimate(axis.size) for axis in node.axes)
        if self.capabilities.ordered and is_held(self.dependences.program, node, self.capabilities.rates.steps):
            points = min(points, self.dependences.estimate(self.dependences.program.buffers[node.out].numel))
        return points * node.value.dtype.itemsize * (1 if node.op == "store" else 2)
