"""Predicts whether one kernel is faster than two.

A cluster's time is a `Price`: memory (`traffic.py`) and arithmetic, which overlap, and a launch.  Arithmetic counts
every node at every point where it is evaluated (`evaluations.py`), so recomputation has its price.  The constants come
from the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeAlias

import torch

from fusion.codegen.price import Price, Rates
from fusion.codegen.target import Capabilities
from fusion.lowering.ir.expr import Load, loads
from fusion.lowering.ir.program import Contract, Map, Node, Program, Reduce, reads, writes
from fusion.schedule.clusters.alike import Alike
from fusion.schedule.clusters.evaluations import Evaluations
from fusion.schedule.clusters.legality import Cluster, SeveralLoops
from fusion.schedule.clusters.misaligned_rows import alignment_of_calls, generated_share, is_odd
from fusion.schedule.clusters.traffic import ClusterTraffic
from fusion.schedule.clusters.work import additions_in_tiles, additions_per_point, factors_of
from fusion.schedule.iteration.contractions import slowdown
from fusion.schedule.iteration.dependences import Dependences

EARLY = 1 << 22
"""Bytes that a kernel may compute long before they are needed, to share a launch: they are live that long."""


NARROW = (torch.float16, torch.bfloat16)


ChainedShare: TypeAlias = "Callable[[Prices, Cluster], float]"
"""Returns the efficiency of the contractions of a chain, relative to the library's; see `kernels/time.py`."""


class Prices:
    """Predicted times, in microseconds, of clusters of one Program on one target.

    Args:
        chained_share: returns the efficiency of a chain; without it, it is the same for all chains of a target.
        before: of an earlier version of the Program, with the same target, sizes and `chained_share`: prices of
            clusters that did not change are taken from it.
    """

    def __init__(
        self,
        dependences: Dependences,
        capabilities: Capabilities,
        chained_share: ChainedShare | None = None,
        before: Prices | None = None,
    ) -> None:
        self.dependences = dependences
        self.capabilities, self.rates = capabilities, capabilities.rates
        self.chained_share: ChainedShare = chained_share or (lambda prices, cluster: capabilities.chained)
        self.alike: Alike = Alike(dependences, None if before is None else before.alike)
        self.evaluations = Evaluations(dependences, capabilities)
        self._traffic = ClusterTraffic(self.evaluations)
        self.times: dict[tuple[int, ...], float] = {}  # members → predicted time, of clusters that were formed

    @cached_property
    def work(self) -> list[float]:
        """Additions per point of each node."""
        return self._of_nodes(additions_per_point)

    @cached_property
    def work_in_tiles(self) -> list[float]:
        """Additions per point of each node in a kernel of products, whose other arithmetic no memory access hides."""
        return self._of_nodes(additions_in_tiles)

    def _of_nodes(self, additions: Callable[[Program, Node, Rates], float]) -> list[float]:
        """Count the additions of each node, once for all nodes that are alike."""
        program, known = self.dependences.program, dict[int, float]()
        counts = []
        for position, node in enumerate(program.nodes):
            form = self.alike.node(position).form if position in self.dependences.generated else -1
            if form not in known:
                known[form] = additions(program, node, self.rates)
            counts.append(known[form])
        return counts

    def worth(self, first: Cluster, second: Cluster, joined: Cluster) -> str | None:
        """Return the reason for refusal; None if the joined kernel is predicted at least as fast as both kernels."""
        separately = 0.0
        for side in (first, second):
            if side.members not in self.times:
                self.times[side.members] = self.time(side)
            separately += self.times[side.members]
        try:
            together = self.time(joined)
        except SeveralLoops as refusal:
            return str(refusal)
        if together <= separately:
            self.times[joined.members] = together
            return None
        return f"together it would take longer ({together:.1f} µs against {separately:.1f} µs)"

    def time(self, cluster: Cluster) -> float:
        """Return the predicted microseconds of one launch of `cluster`, launch overhead included."""
        return self.price(cluster).total

    def price(self, cluster: Cluster) -> Price:
        """Return the predicted microseconds of one launch of `cluster`, by part."""
        return self.alike.of_first("price", cluster, lambda: self._price(cluster))[0]

    def _price(self, cluster: Cluster) -> Price:
        moved = self.moved(cluster)
        scalars = sum(self.scalar_times(cluster).values())
        return self.rates.price(moved, products=self._products(cluster), scalars=scalars, share=self._busy(cluster))

    def moved(self, cluster: Cluster) -> int:
        """Return the bytes that one launch of `cluster` moves, with those of memory requests for single elements."""
        return self._traffic.moved(cluster)

    def traffic(self, cluster: Cluster) -> tuple[int, int]:
        """Return the bytes (read, written): every tensor from outside once, every stored result once."""
        return self._traffic.read_and_written(cluster)

    def _busy(self, cluster: Cluster) -> float:
        """Return the occupancy of a reduction, as a share of the device: one program computes one row."""
        if not cluster.space.reduced or cluster.space.rigid:
            return 1.0
        spread = (axis for axis in cluster.space.parallel if axis.symbol not in cluster.space.held)
        rows = max(1, math.prod(self.dependences.estimate(axis.size) for axis in spread))
        if cluster.space.folds_both_ways:  # one program to a multiprocessor holds as much as its registers can
            slots = self.capabilities.multiprocessors or self.capabilities.parallelism
            return rows / (slots * -(-rows // slots))
        return min(1.0, rows / self.capabilities.parallelism)

    def _products(self, cluster: Cluster) -> float:
        shared = 1.0 if cluster.space.chained else slowdown(self.dependences, cluster.members, self.capabilities.tiles)
        multiplied = 0.0
        for member in cluster.members:
            node = self.dependences.compute(member)
            if isinstance(node, Contract):
                misaligned = not cluster.space.chained and self._is_misaligned(cluster, node)
                share = generated_share(node, self.dependences.estimate, self.capabilities) if misaligned else 1.0
                multiplied += self.contraction(cluster, node) / share
        return multiplied * shared

    def scalar_times(self, cluster: Cluster) -> dict[int, float]:
        """Return the microseconds of the scalar units for each member that is no contraction."""
        sizes = {s: self.dependences.estimate(n) for s, n in cluster.space.sizes.items()}
        inside = {self.dependences.outs[m]: m for m in cluster.members}
        points: dict[int, int] = {}
        evaluated: dict[int, float] = {}
        windows, lanes = self.evaluations.split_windows(cluster), self.evaluations.lanes(cluster)
        in_windows = self.evaluations.in_windows(cluster, windows) if windows else 1.0
        copies, after = self.evaluations.copies(cluster), self.evaluations.after_outer_loop(cluster)
        times: dict[int, float] = {}
        folded, drawn = {axis.symbol for axis in cluster.space.reduced}, self.evaluations.drawn_again(cluster)
        for member in reversed(cluster.members):  # readers come before their producers
            placement = cluster.places.get(member)
            if placement is None:
                points[member] = max(points.get(member, 1), 1)
            else:
                spanned = {s for expr in placement.values() for s in expr.free_symbols if s in sizes}
                points[member] = max(points.get(member, 1), self.evaluations.points(cluster, spanned, sizes, lanes))
                once = spanned | cluster.space.outer if member in after else spanned
                evaluated[member] = self.evaluations.by_tiles(cluster, once) if cluster.space.rigid else 1
                evaluated[member] *= 1 if windows.isdisjoint(spanned) else in_windows
                if lanes is not None and lanes not in spanned and not spanned.isdisjoint(folded):
                    evaluated[member] *= self.rates.steps.shared
            if isinstance(self.dependences.node(member), Contract):
                continue
            work = self.work_in_tiles if cluster.space.rigid else self.work
            additions = (work[member] - drawn.get(member, 0.0)) * evaluated.get(member, 1)
            additions += self._conversions(member, inside)
            times[member] = self.rates.scalar_us(additions * points[member] * copies.get(member, 1))
            for load in self.dependences.loads[member]:
                producer = inside.get(load.buffer)
                if producer is not None and producer not in cluster.places:
                    points[producer] = points.get(producer, 0) + points[member]
                    evaluated[producer] = max(evaluated.get(producer, 1), evaluated.get(member, 1))
        return times

    def _conversions(self, member: int, inside: Mapping[str, int]) -> float:
        """Return the additions in which one point of a member converts 16-bit floats that are loaded and stored.

        A copy moves them as they are.
        """
        steps, program = self.rates.steps, self.dependences.program
        node = self.dependences.compute(member)
        if not (steps.widened or steps.narrowed) or (isinstance(node, Map) and isinstance(node.expr, Load)):
            return 0.0
        multiplies = isinstance(node, Reduce) and factors_of(node) is not None  # at a rate that includes them
        read = () if multiplies else (name for name in self._traffic.places[member] if name not in inside)
        loaded = sum(self._traffic.places[member][name] for name in read if program.buffers[name].dtype in NARROW)
        stored = self._traffic.is_stored(member, frozenset(inside.values()))
        narrow = program.buffers[self.dependences.outs[member]].dtype in NARROW
        return steps.widened * loaded + (steps.narrowed if stored and narrow else 0.0)

    def contraction(self, cluster: Cluster, node: Contract, itemsize: int | None = None) -> float:
        """Return the microseconds of a contraction on the matrix units at the library's speed, for aligned rows.

        Args:
            itemsize: bytes of an element as it is multiplied, if not as the node has it.
        """
        points = math.prod(self.dependences.estimate(axis.size) for axis in (*node.axes, *node.over))
        share = self.chained_share(self, cluster) if cluster.space.chained else 1.0
        return self.rates.product_us_of(2 * points, itemsize or node.lhs.dtype.itemsize) / share

    def by_library(self, cluster: Cluster, node: Contract) -> float:
        """Return the microseconds of the library's product on the matrix units, with the packing of its operands.

        Of a batch, each matrix has tiles of its own, whether it fills them or not.
        """
        share, slowly, program = 1.0, 0.0, self.dependences.program
        calls = program.library.get(node.out, ())
        factors = {name for each in calls if node.out in writes(each) for name in reads(each)}
        itemsize = max((program.buffers[name].dtype.itemsize for name in factors), default=None)  # perhaps widened
        if self.capabilities.alignment > 1:
            rows, aligned = self.capabilities.misaligned_rows, alignment_of_calls(calls, program.buffers)
            share = rows.library[aligned] * self._filled(node)
            if rows.moved[aligned] < 1:
                moved = sum(map(self.dependences.bytes, {node.out, *factors}))
                slowly = self.rates.memory_us(moved) / rows.moved[aligned]
        return max(self.contraction(cluster, node, itemsize) / share, slowly) + self.packing(node, library=True)

    def _filled(self, node: Contract) -> float:
        """Return the share of the library's smallest tile that a matrix of a batch fills, in 16 bits."""
        sides, axes = (node.rows, node.columns), {axis.symbol: axis.size for axis in node.axes}
        if node.lhs.dtype.itemsize != 2 or not axes.keys() - {*node.rows, *node.columns}:
            return 1.0
        lengths = (math.prod(self.dependences.estimate(axes[symbol]) for symbol in side) for side in sides)
        return math.prod(min(1.0, length / self.capabilities.tiles.least_columns) for length in lengths)

    def packing(self, node: Contract, *, library: bool = False) -> float:
        """Return the microseconds in which the operands of a product are brought into the order that blocks read."""
        operands, steps = sum(self.dependences.bytes(load.buffer) for load in loads(*node.exprs)), self.rates.steps
        return self.rates.scalar_us((steps.packed_by_library if library else steps.packed) * operands)

    def _is_misaligned(self, cluster: Cluster, node: Contract) -> bool:
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
