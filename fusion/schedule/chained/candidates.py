"""Finds the contractions, and maps of them, that can be computed block by block and never reach memory.

Input: a program with its dependences; output: the positions of its tiles.  A tile's contraction has an axis short
enough to be held, and a result of at least half its operands' size; or it has few rows, a smaller result, and a batch
or large operands.  No reader of a tile needs all of it at once.  Which of them are chained is decided by price.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from typing_extensions import assert_never

from fusion.codegen.target import Capabilities
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import free_axes, loads
from fusion.lowering.ir.program import Contract, Extern, Map, Reduce, Scan, Scatter
from fusion.schedule.chained.place_producers import LONGEST_HELD_AXIS
from fusion.schedule.chained.rows import MATRIX_UNIT_ROWS
from fusion.schedule.iteration.dependences import Dependences

LEAST_TILE = 1 << 18
"""Elements of tiles below which two launches of a GPU and a trip through its cache are too cheap to avoid."""

LEAST_SHARE = 2
"""How many times smaller than the operands of a batch of products their tiles may be.

Stored, they would be written, and read at least twice.  (Windows of 7 × 7 pixels in heads of 32: 2401 scores of 3136
numbers.)  Without a batch, one operand would be read again for each block of rows.
"""


def tiles_of(dependences: Dependences, capabilities: Capabilities, stored: Collection[int] = ()) -> frozenset[int]:
    """Return contractions over a short axis, and maps of them, whose readers all need parts only; without `stored`."""
    least = LEAST_TILE * capabilities.least_tile
    tiles: set[int] = set()
    for position, node in enumerate(dependences.program.nodes):
        is_map_of_tiles = isinstance(node, Map) and any(p in tiles for p in dependences.producers(position))
        if is_map_of_tiles or (
            position not in stored and isinstance(node, Contract) and _is_worth_recomputing(dependences, node, least)
        ):
            tiles.add(position)
    for position in sorted(tiles, reverse=True):
        out = dependences.compute(position).out
        readers = dependences.readers.get(out, [])
        if out in dependences.outputs or not readers or any(_needs_whole(dependences, r, tiles) for r in readers):
            tiles.discard(position)
    return frozenset(tiles)


def _is_worth_recomputing(dependences: Dependences, node: Contract, least: float) -> bool:
    """Return whether a contraction's axis is short, and its result larger than its operands, half as large in a batch,
    or of few rows.
    """
    if len(node.over) != 1 or not node.over[0].size.is_Integer or node.over[0].size > LONGEST_HELD_AXIS:
        return False
    sizes = {axis.symbol: dependences.estimate(axis.size) for axis in node.axes}
    summed = {axis.symbol: dependences.estimate(axis.size) for axis in node.over} | sizes
    read = {load: math.prod(summed.get(axis, 1) for axis in free_axes(load)) for load in loads(node.lhs, node.rhs)}
    operand_bytes = sum(min(dependences.bytes(x.buffer), x.dtype.itemsize * points) for x, points in read.items())
    shared = {*node.rows, *node.columns, node.over[0].symbol} >= sizes.keys()  # without a batch
    if (1 if shared else LEAST_SHARE) * dependences.bytes(node.out) > operand_bytes:
        return math.prod(sizes.values()) >= least
    sides = [math.prod(sizes[symbol] for symbol in side) for side in (node.rows, node.columns)]
    return min(sides) <= MATRIX_UNIT_ROWS and (not shared or operand_bytes >= least * node.lhs.dtype.itemsize)


def _needs_whole(dependences: Dependences, reader: int, tiles: Collection[int]) -> bool:
    """Return whether a reader needs a tile in memory: no loop over tiles keeps the running values of a scan."""
    match dependences.node(reader):
        case Extern() | Chunked() | Scan() | Scatter():
            return True
        case Map():
            return reader not in tiles
        case Reduce() | Contract():
            return False
        case unknown:
            assert_never(unknown)
