"""Places all producers of one sink in the iteration space of that sink.

Input: the tiles of a program and a sink (see `streams/`); output: a `Stream`: each node with its axes over those of the
sink, as the indices say at which it is read.  Refused, by None: a tile that is read at several points, or at one that
would have it made again for every column of the sink.  `products_of_vectors` are those that would be no products of
matrices at the points where they are read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import sympy

from fusion.lowering.expr import Expr, Load, free_axes, loads
from fusion.lowering.indexing import replace_axes, substitute_all
from fusion.lowering.program import Axis, Compute, Contract, Map, Reduce, Scan
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Placement, Space, fresh

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


def products_of_vectors(dependences: Dependences, made: Stream) -> frozenset[int]:
    """The products of a stream that are none of two matrices, where they are made.

    Both operands may vary along an axis of which a program has one value, such as a batch; not along the one that it
    walks, nor along rows of its sink: each element of a block would be a product of two vectors of its own.  So it is
    where queries times a table of relative positions are read at the distance of each key.  Nor may a side vary along
    such an axis alone where others have rows: it would be a vector (what is added to the scores of each key).
    """
    sides: dict[int, tuple[frozenset[sympy.Symbol], frozenset[sympy.Symbol]]] = {}
    points = {symbol for symbol, size in made.space.sizes.items() if size == 1}
    for member, placement in made.places.items():
        node = dependences.compute(member)
        if isinstance(node, Contract):
            over = {symbol for axis in node.over for symbol in placement[axis.symbol].free_symbols}
            left, right = (free_axes(side) for side in substitute_all(node.exprs, placement, made.space.sizes))
            sides[member] = left - over - points, right - over - points
    blocks = {axis.symbol for axis in made.space.reduced}
    blocks |= {symbol for sink in made.sinks if sink in sides for symbol in sides[sink][0] ^ sides[sink][1]}
    crossed = frozenset(member for member, (left, right) in sides.items() if left & right & blocks)
    alone = frozenset(symbol for left, right in sides.values() for symbol in left & right)
    vectors = frozenset(member for member, both in sides.items() if not all(side - alone for side in both))
    return crossed or (vectors if len(vectors) < len(sides) else frozenset())


class Pull:
    """Placing everything that leads to one sink, by the indices at which it is read; `left` to memory is left out."""

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
            for load, producer in self._made_for(member):
                placement = self._placement(producer, load, self.places[member])
                if placement is None:
                    if producer in self.tiles:
                        return None  # a tile cannot be left to memory: nobody else makes it
                elif producer not in self.places:
                    self.places[producer] = placement
                    todo.append(producer)
                elif self.places[producer] != placement:
                    return None
        if not self.private:
            return None
        held = frozenset(axis.symbol for axis in self.held)
        parallel = self.dependences.compute(self.sink).axes
        space = Space(parallel, self.walked, rigid=True, held=held, private=tuple(self.private))
        return Stream((self.sink,), space, self.places)

    def _across(self, node: Contract) -> tuple[sympy.Symbol, ...]:
        """The axes of the side of a contraction that is not a tile."""
        writer = self.dependences.writer
        made = any(writer.get(load.buffer) in self.tiles for load in loads(node.lhs))
        return node.columns if made else node.rows

    def _made_for(self, member: int) -> Iterator[tuple[Load, int]]:
        """What a node reads that is to be made beside it, and who makes that."""
        for load in self.dependences.loads[member]:
            producer = self.dependences.writer.get(load.buffer)
            if producer is not None and producer not in self.left and self._wanted(producer):
                yield load, producer

    def _wanted(self, producer: int) -> bool:
        if producer in self.tiles:
            return True
        node = self.dependences.node(producer)
        if not isinstance(node, (Map, Reduce, Scan)):
            return False
        return any(p in self.tiles or self._wanted_row(p) for p in self.dependences.producers(producer))

    def _wanted_row(self, producer: int) -> bool:
        """Is this a number per row that is made of tiles (a maximum, a sum)?"""
        node = self.dependences.node(producer)
        if isinstance(node, Reduce):
            return any(p in self.tiles for p in self.dependences.producers(producer))
        return isinstance(node, Map) and any(self._wanted_row(p) for p in self.dependences.producers(producer))

    def _placement(self, producer: int, load: Load, at: Placement) -> Placement | None:
        """Where a producer stands if `load` reads it in a node that stands at `at`; None where it cannot.

        It may vary along what is spread and walked, never along what a program holds whole: it would be made again for
        each point of that.  A product is walked along its rows or columns; a reduction runs over what is walked.
        """
        node, walked = self.dependences.compute(producer), {axis.symbol for axis in self.walked}
        inner = {axis.symbol for axis in (*self.held, *self.private)}
        found = self._read_at(node, load, at)
        if found is None or any(expr.free_symbols & inner for expr in found.values()):
            return None
        varying = {symbol for symbol, expr in found.items() if expr.free_symbols & walked}
        if isinstance(node, Contract):
            return found | self._kept_private(producer, node) if varying <= {*node.rows, *node.columns} else None
        if isinstance(node, Reduce):
            if varying or [axis.size for axis in node.over] != [axis.size for axis in self.walked]:
                return None
            return found | {axis.symbol: other.symbol for axis, other in zip(node.over, self.walked, strict=True)}
        return found

    def _read_at(self, node: Compute, load: Load, at: Placement) -> dict[sympy.Symbol, sympy.Expr] | None:
        """The axes of a node's result, as a load names them that stands at `at`; None if data tell one."""
        found: dict[sympy.Symbol, sympy.Expr] = {}
        for axis, index in zip(node.axes, load.index, strict=True):
            moved = index if isinstance(index, Expr) else replace_axes(index, at, self.sizes)
            if isinstance(moved, Expr):
                return None
            found[axis.symbol] = moved
        return found

    def _kept_private(self, producer: int, node: Contract) -> dict[sympy.Symbol, sympy.Expr]:
        """The axes that a product runs over, in the kernel: those it has there already, or axes of its own."""
        if (known := self.places.get(producer)) is not None:
            return {axis.symbol: known[axis.symbol] for axis in node.over}
        found: dict[sympy.Symbol, sympy.Expr] = {}
        for axis in node.over:
            found[axis.symbol] = symbol = fresh("d", self.sizes)
            self.private.append(Axis(symbol, axis.size))
            self.sizes[symbol] = axis.size
        return found
