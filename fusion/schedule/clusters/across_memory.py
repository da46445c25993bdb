"""Predicts the memory traffic of reductions that read or store across memory.

A kernel with folds has one block dimension for all parallel axes and one for the axes that it folds together;
neighbouring threads take neighbouring points of one of them.  Where two tensors are contiguous along different axes of
the same dimension, each element of one is a separate memory request.  A map computes tiles that are contiguous on both
sides, and pays nothing: so a result in another layout is better stored by a separate kernel.

On a CPU the lanes of such a kernel run along its rows if these are what it reads along.  Each element that it stores
along another axis is in a line of memory of its own.  The rows that follow fill these lines, if the nearest cache keeps
so many; else each element moves a whole line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import sympy

from fusion.codegen.target import NearestCache
from fusion.lowering.indexing import ONE, coefficient, symbols_of
from fusion.lowering.ir.expr import Expr, Load
from fusion.lowering.ir.program import Buffer, Reduce, Scan
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.iteration.dependences import Dependences

SMALLEST_CROSSED = 1 << 16
"""Bytes of the smallest tensor that counts: a smaller one stays in a cache close to the multiprocessor."""


@dataclass(frozen=True, slots=True)
class ContiguousAccess:
    """Describes one load or store with the node axis along which it is contiguous in memory."""

    buffer: Buffer
    axis: sympy.Symbol


class Crossings:
    """The bytes that clusters of one Program move in excess, in requests of `sector` bytes, or lines of `nearest`."""

    def __init__(self, dependences: Dependences, sector: int, nearest: NearestCache | None = None) -> None:
        self._dependences, self._sector, self._nearest = dependences, sector, nearest
        self._loads: dict[int, tuple[ContiguousAccess, ...]] = {}

    def excess(self, cluster: Cluster) -> int:
        """Return the bytes of memory requests beyond the elements that a cluster loads and stores."""
        if not cluster.space.reduced or cluster.space.rigid:
            return 0
        return self._requests(cluster) + self._lines(cluster)

    def _requests(self, cluster: Cluster) -> int:
        """Return the bytes beyond the elements of requests along a dimension that another tensor is contiguous in."""
        if not self._sector:
            return 0
        along: dict[object, Counter[sympy.Symbol]] = {}  # block dimension → axis → the excess if others have it
        dimension = _dimensions(self._dependences, cluster)
        for buffer, axis, _ in self._accesses(cluster):
            times = max(0, self._sector // buffer.dtype.itemsize - 1)
            along.setdefault(dimension[axis], Counter())[axis] += self._dependences.bytes(buffer.name) * times
        return sum(sum(axes.values()) - max(axes.values()) for axes in along.values())

    def _lines(self, cluster: Cluster) -> int:
        """Return the bytes of lines beyond the elements that a cluster stores along another axis than its lanes."""
        if self._nearest is None:
            return 0
        dimension, rows, across, excess = _dimensions(self._dependences, cluster), 0, 0, 0
        for buffer, axis, stored in self._accesses(cluster):
            moved = self._dependences.bytes(buffer.name)
            if dimension[axis]:
                rows += moved
                continue
            across += moved
            if stored and self._is_evicted(cluster, buffer):
                excess += moved * max(0, self._nearest.line // buffer.dtype.itemsize - 1)
        return excess if rows >= across else 0

    def _is_evicted(self, cluster: Cluster, buffer: Buffer) -> bool:
        """Return whether rows are stored element by element, and the nearest cache does not keep the lines of one."""
        assert self._nearest is not None
        writer = self._dependences.writer[buffer.name]
        node, placement = self._dependences.compute(writer), cluster.places[writer]
        folded = {axis.symbol for axis in cluster.space.reduced}
        dims = zip(node.axes, buffer.strides, strict=True)
        strides = [stride for axis, stride in dims if not folded.isdisjoint(symbols_of(placement[axis.symbol]))]
        count = math.prod(self._dependences.estimate(axis.size) for axis in cluster.space.reduced)
        apart = [self._dependences.estimate(stride) * buffer.dtype.itemsize for stride in strides]
        return bool(apart) and not self._nearest.keeps(count, apart)

    def _accesses(self, cluster: Cluster) -> Iterator[tuple[Buffer, sympy.Symbol, bool]]:
        """Yield the large buffers that a cluster accesses, each with its contiguous axis, and whether it is stored."""
        inside = {self._dependences.outs[member] for member in cluster.members}
        sizes, seen = cluster.space.sizes, set[tuple[str, sympy.Symbol]]()
        for member, placement in cluster.places.items():
            stores = self._stored(member) if self._dependences.stored(member, cluster.members) else ()
            reads = (access for access in self._read(member) if access.buffer.name not in inside)
            accesses = *((access, False) for access in reads), *((access, True) for access in stores)
            for access, stored in accesses:
                placed = placement.get(access.axis)
                axis = None if placed is None else _unit(placed, sizes)
                if axis is not None and (access.buffer.name, axis) not in seen:
                    seen.add((access.buffer.name, axis))
                    yield access.buffer, axis, stored

    def _read(self, member: int) -> tuple[ContiguousAccess, ...]:
        if member not in self._loads:
            loads = (self._access(load) for load in self._dependences.loads[member])
            self._loads[member] = tuple(access for access in loads if access is not None)
        return self._loads[member]

    def _access(self, load: Load) -> ContiguousAccess | None:
        """Return the access of a load at known positions; None if it is small, or contiguous along no axis."""
        buffer = self._dependences.program.buffers[load.buffer]
        if self._dependences.bytes(load.buffer) < SMALLEST_CROSSED:
            return None
        for size, stride, index in zip(buffer.shape, buffer.strides, load.index, strict=True):
            if stride == ONE and size != ONE and not isinstance(index, Expr):
                axis = _unit(index, symbols_of(index))
                return None if axis is None else ContiguousAccess(buffer, axis)
        return None

    def _stored(self, member: int) -> tuple[ContiguousAccess, ...]:
        node = self._dependences.compute(member)
        buffer = self._dependences.program.buffers[self._dependences.outs[member]]
        if self._dependences.bytes(buffer.name) < SMALLEST_CROSSED or len(node.axes) != len(buffer.shape):
            return ()
        dims = zip(node.axes, buffer.shape, buffer.strides, strict=True)
        return tuple(
            ContiguousAccess(buffer, axis.symbol) for axis, size, stride in dims if stride == ONE and size != ONE
        )[:1]


def _dimensions(dependences: Dependences, cluster: Cluster) -> dict[sympy.Symbol, object]:
    """Return the axes of a cluster, each with its block dimension: the folds along it, none for a parallel axis."""
    folding: dict[sympy.Symbol, list[int]] = {axis.symbol: [] for axis in cluster.space.axes}
    for member, placement in cluster.places.items():
        node = dependences.node(member)
        if isinstance(node, (Reduce, Scan)):
            folded = (axis.symbol for axis in (node.over if isinstance(node, Reduce) else (node.scanned,)))
            for axis in set[sympy.Symbol]().union(*(symbols_of(placement[axis]) for axis in folded)):
                folding.setdefault(axis, []).append(member)
    return {axis: tuple(members) for axis, members in folding.items()}


def _unit(index: sympy.Expr, axes: Collection[sympy.Symbol]) -> sympy.Symbol | None:
    """Return the one of `axes` along which an index advances by one."""
    if isinstance(index, sympy.Symbol):
        return index if index in axes else None
    return next((axis for axis in axes if coefficient(index, axis) == ONE), None)
