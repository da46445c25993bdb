"""Places all producers of one sink in the iteration space of that sink.

Input: the tiles of a program and a sink (see `chained/`); output: a `Chain`: each node with its axes as functions of
the sink's axes, according to the indices at which it is read.  Refused, by None: a tile that is read at several points,
or at one where every column of the sink would recompute it.  `products_of_vectors` are the products that degenerate to
vectors at the points where they are read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import sympy

from fusion.lowering.indexing import replace_axes, substitute_all
from fusion.lowering.indexing.intervals import interval
from fusion.lowering.ir.expr import Expr, Load, free_axes, loads
from fusion.lowering.ir.program import Axis, Compute, Contract, Map, Reduce
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Placement, Space, fresh

LONGEST_HELD_AXIS = 256
"""The longest axis that a program holds whole beside the tile: columns of a sink, and short axes of tiles.

Blocks have constant sizes, so an axis of symbolic size is never held, whatever its first size.
"""


@dataclass(frozen=True, slots=True)
class Chain:
    """A future kernel: its sinks, and the placement of all nodes in their space."""

    sinks: tuple[int, ...]
    space: Space
    places: Mapping[int, Placement]


def products_of_vectors(dependences: Dependences, chain: Chain) -> frozenset[int]:
    """Return the products of a chain that are not products of two matrices where they are computed.

    Both operands may vary along an axis of which a program has one value, such as a batch; not along the looped axis,
    nor along rows of its sink: each element of a block would be the product of its own two vectors.  That happens where
    queries times a table of relative positions are read at the distance of each key.  Nor may a side vary along such an
    axis alone where others have rows: it would be a vector (a term added to the scores of each key).
    """
    sides: dict[int, tuple[frozenset[sympy.Symbol], frozenset[sympy.Symbol]]] = {}
    points = {symbol for symbol, size in chain.space.sizes.items() if size == 1}
    for member, placement in chain.places.items():
        node = dependences.compute(member)
        if isinstance(node, Contract):
            over = {symbol for axis in node.over for symbol in placement[axis.symbol].free_symbols}
            left, right = (free_axes(side) for side in substitute_all(node.exprs, placement, chain.space.sizes))
            sides[member] = left - over - points, right - over - points
    blocks = {axis.symbol for axis in chain.space.reduced}
    blocks |= {symbol for sink in chain.sinks if sink in sides for symbol in sides[sink][0] ^ sides[sink][1]}
    crossed = frozenset(member for member, (left, right) in sides.items() if left & right & blocks)
    batch = frozenset(symbol for left, right in sides.values() for symbol in left & right)
    vectors = frozenset(member for member, both in sides.items() if not all(side - batch for side in both))
    return crossed or (vectors if len(vectors) < len(sides) else frozenset())


class ProducerPlacement:
    """Places all producers of one sink by the indices at which they are read; those `left` to memory are omitted.

    Attributes:
        blocking: the products of a tile that is read along axes which would recompute it, so that there is no chain.
            A tile that is read at positions which are data does not count: a gather takes longer in a loop than alone
            (measured: docs/performance.md, `place_producers`).
    """

    def __init__(self, dependences: Dependences, tiles: Collection[int], sink: int, left: Collection[int]) -> None:
        self.dependences, self.tiles, self.sink, self.left = dependences, tiles, sink, left
        node = self.dependences.compute(sink)
        across = set(self._across(node)) if isinstance(node, Contract) else set()
        self.grid = tuple(axis for axis in node.axes if axis.symbol not in across)
        self.held = tuple(axis for axis in node.axes if axis.symbol in across)
        self.looped = node.over
        self.private: list[Axis] = []
        self.sizes = {axis.symbol: axis.size for axis in (*node.axes, *node.over)}
        self.places: dict[int, Placement] = {sink: {axis: axis for axis in self.sizes}}
        self.blocking: frozenset[int] = frozenset()

    def run(self) -> Chain | None:
        """Return the chain; None if a producer of the sink cannot be placed, or there is no product among them."""
        if not self.grid or not all(axis.size.is_Integer for axis in self.held):
            return None
        if math.prod(int(axis.size) for axis in self.held) > LONGEST_HELD_AXIS:
            return None
        todo = [self.sink]
        while todo:
            member = todo.pop()
            for load, producer in self._producers(member):
                placement = self._placement(producer, load, self.places[member])
                if placement is None:
                    if producer in self.tiles:  # it cannot be left in memory: nothing else computes it
                        if not any(isinstance(index, Expr) for index in load.index):
                            self.blocking = self._products_of(producer)
                        return None
                elif producer not in self.places:
                    self.places[producer] = placement
                    todo.append(producer)
                elif self.places[producer] != placement:
                    return None
        if not self.private:
            return None
        held = frozenset(axis.symbol for axis in self.held)
        parallel = self.dependences.compute(self.sink).axes
        space = Space(parallel, self.looped, rigid=True, held=held, private=tuple(self.private))
        return Chain((self.sink,), space, self.places)

    def _products_of(self, tile: int) -> frozenset[int]:
        """Return the products that a tile is computed from in its kernel."""
        if isinstance(self.dependences.node(tile), Contract):
            return frozenset((tile,))
        within = (producer for producer in self.dependences.producers(tile) if producer in self.tiles)
        return frozenset().union(*map(self._products_of, within))

    def _across(self, node: Contract) -> tuple[sympy.Symbol, ...]:
        """Return the axes of the side of a contraction that is not a tile."""
        writer = self.dependences.writer
        left_is_tile = any(writer.get(load.buffer) in self.tiles for load in loads(node.lhs))
        return node.columns if left_is_tile else node.rows

    def _producers(self, member: int) -> Iterator[tuple[Load, int]]:
        """Yield the loads of a node whose producers belong to the chain, with the producers."""
        for load in self.dependences.loads[member]:
            producer = self.dependences.writer.get(load.buffer)
            if producer is not None and producer not in self.left and self._is_placed(producer):
                yield load, producer

    def _is_placed(self, producer: int) -> bool:
        if producer in self.tiles:
            return True
        node = self.dependences.node(producer)
        if not isinstance(node, (Map, Reduce)):
            return False
        return any(p in self.tiles or self._is_row_statistic(p) for p in self.dependences.producers(producer))

    def _is_row_statistic(self, producer: int) -> bool:
        """Return whether a node is a number per row computed from tiles (a maximum, a sum)."""
        node = self.dependences.node(producer)
        if isinstance(node, Reduce):
            return any(p in self.tiles for p in self.dependences.producers(producer))
        return isinstance(node, Map) and any(self._is_row_statistic(p) for p in self.dependences.producers(producer))

    def _placement(self, producer: int, load: Load, at: Placement) -> Placement | None:
        """Return the placement of a producer that `load` reads in a node placed at `at`; None if it cannot be placed.

        It may vary along grid and loop axes, never along axes that a program holds whole: each point of these would
        recompute it.  A product is looped over along its rows or columns; a reduction has the looped axes.
        """
        node, looped = self.dependences.compute(producer), {axis.symbol for axis in self.looped}
        inner = {axis.symbol for axis in (*self.held, *self.private)}
        placement = self._read_at(node, load, at)
        if placement is None or any(expr.free_symbols & inner for expr in placement.values()):
            return None
        varying = {symbol for symbol, expr in placement.items() if expr.free_symbols & looped}
        if isinstance(node, Contract):
            if any(self._leaves(placement[axis.symbol], axis) for axis in node.axes):
                return None  # beside another part of a concatenation: its operands would be read past their ends
            return placement | self._private_axes(producer, node) if varying <= {*node.rows, *node.columns} else None
        if isinstance(node, Reduce):
            if varying or [axis.size for axis in node.over] != [axis.size for axis in self.looped]:
                return None
            return placement | {axis.symbol: other.symbol for axis, other in zip(node.over, self.looped, strict=True)}
        return placement

    def _leaves(self, position: sympy.Expr, axis: Axis) -> bool:
        """Return whether a position takes values outside of an axis, as far as its bounds are known."""
        limits = interval(position, self.sizes)
        return limits is not None and bool(limits[0] < 0 or (axis.size.is_Integer and limits[1] >= axis.size))

    def _read_at(self, node: Compute, load: Load, at: Placement) -> dict[sympy.Symbol, sympy.Expr] | None:
        """Return the axes of a node's result at the index of a load placed at `at`; None if an index is loaded."""
        axes: dict[sympy.Symbol, sympy.Expr] = {}
        for axis, index in zip(node.axes, load.index, strict=True):
            moved_index = index if isinstance(index, Expr) else replace_axes(index, at, self.sizes)
            if isinstance(moved_index, Expr):
                return None
            axes[axis.symbol] = moved_index
        return axes

    def _private_axes(self, producer: int, node: Contract) -> dict[sympy.Symbol, sympy.Expr]:
        """Return the reduced axes of a product in the kernel: its present ones, or new private axes."""
        if (known := self.places.get(producer)) is not None:
            return {axis.symbol: known[axis.symbol] for axis in node.over}
        axes: dict[sympy.Symbol, sympy.Expr] = {}
        for axis in node.over:
            axes[axis.symbol] = symbol = fresh("d", self.sizes)
            self.private.append(Axis(symbol, axis.size))
            self.sizes[symbol] = axis.size
        return axes
