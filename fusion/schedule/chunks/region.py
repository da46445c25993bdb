"""Finds regions: the nodes that must run together so that a large product never exists in full.

Input: a program and a contraction whose result is too large to keep; output: the nodes that can run for a few points of
one of its axes at a time, each with its cut axis.  A node that reduces over the cut axis *closes*: its result is
accumulated over the chunks.

The region contains everything as large as the product, with all its readers and, if it is computed, its producer; and
the nodes on a path between two nodes of the region.  Refused, by None: a reader of another point of the cut axis, or of
the full product; a sum over the cut axis that a node inside waits for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx
import sympy

from fusion.lowering.ir.chunks import COMBINED, Chunked
from fusion.lowering.ir.expr import Expr, Load
from fusion.lowering.ir.program import Contract, Extern, Map, Reduce
from fusion.schedule.chained.place_producers import LONGEST_HELD_AXIS
from fusion.schedule.iteration.dependences import Dependences


@dataclass(frozen=True, slots=True)
class ChunkedRegion:
    """Nodes that run in chunks.

    Attributes:
        axes: node → its cut axis.
        length: points of that axis; a symbolic length is known when the region runs.
        bytes: size of the large product, symbolic sizes as traced.
    """

    axes: Mapping[int, sympy.Symbol]
    length: sympy.Expr
    bytes: int


def find_region(dependences: Dependences, seed: int) -> ChunkedRegion | None:
    """Return the region of the contraction at `seed`, cut along the first of its axes that allows it, or None."""
    node = dependences.compute(seed)
    for axis in node.axes:
        axes = _Growth(dependences, seed, axis.symbol).run()
        if axes is not None:
            return ChunkedRegion(axes, axis.size, dependences.bytes(node.out))
    return None


def is_short(node: Contract) -> bool:
    """Return whether a kernel may recompute the result of this contraction wherever it needs a tile of it."""
    return (
        all(axis.size.is_Integer for axis in node.over)
        and math.prod(int(axis.size) for axis in node.over) <= LONGEST_HELD_AXIS
    )


class _Growth:
    """The region of one contraction and one of its axes."""

    def __init__(self, dependences: Dependences, seed: int, axis: sympy.Symbol) -> None:
        self.dependences = dependences
        self.axes: dict[int, sympy.Symbol] = {seed: axis}
        self.wide = self._elements(dependences.compute(seed).out)

    def run(self) -> dict[int, sympy.Symbol] | None:
        todo = list(self.axes)
        while todo:
            added = [position for member in todo for position in (*self._readers(member), *self._producers(member))]
            todo = []
            for position in sorted(set(added or self._between())):
                if position not in self.axes:
                    if not self._add(position):
                        return None
                    todo.append(position)
        return self.axes if all(map(self._is_sound, self.axes)) else None

    def cut(self, buffer: str) -> int | None:
        """Return the cut dimension of a region's buffer; None if no node of the region computes it in chunks."""
        position = self.dependences.writer.get(buffer)
        if position is None or position not in self.axes or self._closes(position):
            return None
        symbols = [axis.symbol for axis in self.dependences.compute(position).axes]
        return symbols.index(self.axes[position])

    def _closes(self, position: int) -> bool:
        return self.axes[position] in {axis.symbol for axis in self.dependences.compute(position).over}

    def _is_wide(self, buffer: str) -> bool:
        """Return whether a buffer has at least as many elements as the product."""
        return self._elements(buffer) >= self.wide

    def _elements(self, buffer: str) -> int:
        return self.dependences.estimate(self.dependences.program.buffers[buffer].numel)

    def _readers(self, position: int) -> list[int]:
        """Return the readers of a wide result of a node: all of them belong to the region."""
        out = self.dependences.compute(position).out
        if self._closes(position) or not self._is_wide(out):
            return []
        return [reader for reader in self.dependences.readers.get(out, ()) if reader not in self.axes]

    def _producers(self, position: int) -> list[int]:
        """Return the producers of wide operands that a node reads at the cut axis."""
        producers: list[int] = []
        for load in self.dependences.loads[position]:
            writer = self.dependences.writer.get(load.buffer)
            if writer is None or writer in self.axes or not self._is_wide(load.buffer):
                continue
            if self.axes[position] in load.index and not isinstance(self.dependences.node(writer), (Extern, Chunked)):
                producers.append(writer)
        return producers

    def _between(self) -> list[int]:
        """Return the nodes on a path between two nodes of the region, outside it."""
        graph = self.dependences.graph
        first, last = min(self.axes), max(self.axes)
        inside = graph.subgraph(range(first, last + 1))
        after = set().union(*(nx.descendants(inside, position) for position in self.axes))
        before = set().union(*(nx.ancestors(inside, position) for position in self.axes))
        return sorted((after & before) - self.axes.keys())

    def _add(self, position: int) -> bool:
        """Add a node, with the axis at which it reads the region's results, or the region reads its own."""
        node = self.dependences.node(position)
        if not isinstance(node, (Map, Reduce, Contract)):
            return False
        axes = {index for load in self.dependences.loads[position] for index in self._cut_at(load)}
        for reader in self.dependences.readers.get(node.out, ()):
            if reader not in self.axes:
                continue
            for load in self.dependences.loads[reader]:
                if load.buffer == node.out and self.axes[reader] in load.index:
                    axes.add(node.axes[load.index.index(self.axes[reader])].symbol)
        known = {axis.symbol for axis in (*node.axes, *node.over)}
        if len(axes) != 1 or not axes <= known:
            return False
        (self.axes[position],) = known & axes
        return True

    def _cut_at(self, load: Load) -> list[sympy.Expr | Expr]:
        dimension = self.cut(load.buffer)
        return [] if dimension is None else [load.index[dimension]]

    def _is_sound(self, position: int) -> bool:
        """Return whether a node reads only its own points along the cut, and its result can be combined."""
        node, axis = self.dependences.compute(position), self.axes[position]
        for load in self.dependences.loads[position]:
            writer = self.dependences.writer.get(load.buffer)
            if writer in self.axes and self._cut_at(load) != [axis]:
                return False
        if not self._closes(position):
            return not (node.out in self.dependences.outputs and self._is_wide(node.out))
        if isinstance(node, Reduce):
            return node.op in COMBINED and (node.dtype.itemsize >= 4 or node.op != "sum")
        return isinstance(node, Contract)
