"""Pulling: everything that leads to one sink, placed in the space of that sink.

What enters are the tiles of a program and a sink (see `streams/`); what leaves is a `Stream`: each node with its axes
over those of the sink, as the indices say at which it is read.  Refused, by None: a tile that is read at several
points, or at one that would have it made again for every column of the sink.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import sympy

from fusion.schedule.graph import Dependences
from fusion.schedule.space import Placement, Space, fresh
from lowering.expr import Expr, Load, loads
from lowering.indexing import replace_axes
from lowering.program import Axis, Contract, Extern, Map, Reduce, Scatter

HELD = 256
"""The longest axis that a program holds whole beside the tile: columns of a sink, and short axes of tiles.

A block has a constant length, so none is held whose size is symbolic, whatever that is at first.
"""


@dataclass(frozen=True, slots=True)
class Stream:
    """One kernel to be: its sinks, and where everything that was pulled stands in their space."""

    sinks: tuple[int, ...]
    space: Space
    places: Mapping[int, Placement]


class Pull:
    """Placing everything that leads to one sink, by the indices at which it is read."""

    def __init__(self, dependences: Dependences, tiles: Collection[int], sink: int, left: Collection[int]) -> None:
        self.dependences, self.tiles, self.sink, self.left = dependences, tiles, sink, left
        node = self.dependences.compute(sink)
        across = set(self._across(node)) if isinstance(node, Contract) else set()
        self.grid = tuple(axis for axis in node.axes if axis.symbol not in across)
        self.held = tuple(axis for axis in node.axes if axis.symbol in across)
        self.walked = node.over
        self.private: list[Axis] = []
        self.sizes = {axis.symbol: axis.size for axis in (*node.axes, *node.over)}
        self.places: dict[int, Placement] = {sink: {axis: axis for axis in self.sizes}}

    def run(self) -> Stream | None:
        """The stream; None if what leads to the sink cannot be placed, or holds no product."""
        if not self.grid or not all(axis.size.is_Integer for axis in self.held):
            return None
        if math.prod(int(axis.size) for axis in self.held) > HELD:
            return None
        todo = [self.sink]
        while todo:
            member = todo.pop()
            for load in self.dependences.loads[member]:
                producer = self.dependences.writer.get(load.buffer)
                if producer is None or producer in self.left or not self._wanted(producer):
                    continue
                placement = self._placement(producer, load, self.places[member])
                if placement is None:
                    if producer in self.tiles:
                        return None  # a tile cannot be left to memory: nobody else makes it
                    continue
                if producer in self.places:
                    if self.places[producer] != placement:
                        return None
                    continue
                self.places[producer] = placement
                todo.append(producer)
        if not self.private:
            return None
        parallel = tuple(axis for axis in self.dependences.compute(self.sink).axes)
        held = frozenset(axis.symbol for axis in self.held)
        space = Space(parallel, self.walked, rigid=True, held=held, private=tuple(self.private))
        return Stream((self.sink,), space, self.places)

    def _across(self, node: Contract) -> tuple[sympy.Symbol, ...]:
        """The axes of the side of a contraction that is not a tile."""
        writer = self.dependences.writer
        made = any(writer.get(load.buffer) in self.tiles for load in loads(node.lhs))
        return node.columns if made else node.rows

    def _wanted(self, producer: int) -> bool:
        if producer in self.tiles:
            return True
        node = self.dependences.node(producer)
        if isinstance(node, (Extern, Contract, Scatter)):
            return False
        return any(p in self.tiles or self._wanted_row(p) for p in self.dependences.producers(producer))

    def _wanted_row(self, producer: int) -> bool:
        """Is this a number per row that is made of tiles (a maximum, a sum)?"""
        node = self.dependences.node(producer)
        if isinstance(node, Reduce):
            return any(p in self.tiles for p in self.dependences.producers(producer))
        return isinstance(node, Map) and any(self._wanted_row(p) for p in self.dependences.producers(producer))

    def _placement(self, producer: int, load: Load, at: Placement) -> Placement | None:
        node = self.dependences.compute(producer)
        found: dict[sympy.Symbol, sympy.Expr] = {}
        for axis, index in zip(node.axes, load.index, strict=True):
            if isinstance(index, Expr):
                return None
            moved = replace_axes(index, at, self.sizes)
            if isinstance(moved, Expr):
                return None
            found[axis.symbol] = moved
        inner = {axis.symbol for axis in self.held} | {axis.symbol for axis in self.private}
        if any(expr.free_symbols & inner for expr in found.values()):
            return None
        walked = {axis.symbol for axis in self.walked}
        if isinstance(node, Contract):
            sides = {*node.rows, *node.columns}
            if any(expr.free_symbols & walked for symbol, expr in found.items() if symbol not in sides):
                return None
            known = self.places.get(producer)
            for axis in node.over:
                symbol = known[axis.symbol] if known else fresh("d", self.sizes)
                if not known:
                    self.private.append(Axis(symbol, axis.size))
                    self.sizes[symbol] = axis.size
                found[axis.symbol] = symbol
        elif isinstance(node, Reduce):
            if [axis.size for axis in node.over] != [axis.size for axis in self.walked]:
                return None
            if any(expr.free_symbols & walked for expr in found.values()):
                return None
            found.update({axis.symbol: other.symbol for axis, other in zip(node.over, self.walked, strict=True)})
        return found
