"""Finds the contractions, and maps of them, that can be computed block by block and never reach memory.

Input: a program with its dependences; output: the positions of its tiles.  A contraction is one whose axis is short
enough to be held, and whose result is larger than all that it is made of; or one of few rows, smaller than that, where
operands are large.  Of neither does anybody need the whole at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from typing_extensions import assert_never

from fusion.lowering.chunks import Chunked
from fusion.lowering.program import Contract, Extern, Map, Reduce, Scan, Scatter, reads
from fusion.schedule.chained.place_producers import HELD
from fusion.schedule.chained.rows import FEW
from fusion.schedule.iteration.dependences import Dependences

SMALL = 1 << 18
"""Elements of the tiles below which two launches and a trip through the cache cost too little to avoid."""


def tiles_of(dependences: Dependences, stored: Collection[int] = ()) -> frozenset[int]:
    """Contractions over a short axis and maps of them, of which nobody outside needs the whole; not those `stored`."""
    found: set[int] = set()
    for position, node in enumerate(dependences.program.nodes):
        is_map_of_tiles = isinstance(node, Map) and any(p in found for p in dependences.producers(position))
        if is_map_of_tiles or (
            position not in stored and isinstance(node, Contract) and _is_worth_making_again(dependences, node)
        ):
            found.add(position)
    for position in sorted(found, reverse=True):
        out = dependences.compute(position).out
        readers = dependences.readers.get(out, [])
        if out in dependences.outputs or not readers or any(_needs_whole(dependences, r, found) for r in readers):
            found.discard(position)
    return frozenset(found)


def _is_worth_making_again(dependences: Dependences, node: Contract) -> bool:
    """Is the axis of a contraction short, and its result larger than its operands, or of few rows?"""
    if len(node.over) != 1 or not node.over[0].size.is_Integer or node.over[0].size > HELD:
        return False
    sizes = {axis.symbol: dependences.estimate(axis.size) for axis in node.axes}
    taken = sum(dependences.bytes(name) for name in reads(node))
    if dependences.bytes(node.out) > taken:
        return math.prod(sizes.values()) >= SMALL
    sides = [math.prod(sizes[symbol] for symbol in side) for side in (node.rows, node.columns)]
    return min(sides) <= FEW and taken >= SMALL * node.lhs.dtype.itemsize


def _needs_whole(dependences: Dependences, reader: int, tiles: Collection[int]) -> bool:
    match dependences.node(reader):
        case Extern() | Chunked() | Scatter():
            return True
        case Map():
            return reader not in tiles
        case Reduce() | Scan() | Contract():
            return False
        case unknown:
            assert_never(unknown)
