"""Prices the walk of a chain: how many programs it has, how long it takes, how many parts are best.

Input: a stream, as it was found or as a cluster; output: estimates, symbolic sizes at their hints.  A walk by fewer
programs than keep the device busy takes as much longer as there are fewer.  Cut into parts that run side by side it
does not, for another launch, which merges them (see `split_walks.py`).
"""

from __future__ import annotations

import math

import sympy
from typing_extensions import assert_never

from fusion.codegen.target import Capabilities, busy
from fusion.lowering.chunks import Chunked
from fusion.lowering.expr import free_axes
from fusion.lowering.indexing import FloorDiv, substitute_all
from fusion.lowering.program import Contract, Extern, Map, Reduce, Scan, Scatter
from fusion.schedule.chained.place_producers import Stream
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.clusters.misaligned_rows import is_odd
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.rewrites.inline import cost

BLOCK = 64
"""Elements of the walked axis that a program takes at once, and rows of a tile: parts end with a block."""

SHORTEST = 4 * BLOCK
"""The shortest part: below it, filling the pipeline of a walk takes longer than the walk."""


def programs(dependences: Dependences, made: Stream | Cluster) -> int:
    """How many programs the walk of a stream has, uncut: blocks of rows, for each point of the other axes."""
    spread = [axis for axis in made.space.parallel if axis.symbol not in made.space.held]
    rows = rows_of(dependences, made)
    count = math.prod(dependences.estimate(axis.size) for axis in spread if axis.symbol not in rows)
    return count * -(-math.prod(dependences.estimate(axis.size) for axis in spread if axis.symbol in rows) // BLOCK)


def rows_of(dependences: Dependences, made: Stream | Cluster) -> frozenset[sympy.Symbol]:
    """The axes spread over programs that only one side of some product varies along: they are rows of its tile."""
    spread = {axis.symbol for axis in made.space.parallel} - made.space.held
    found: set[sympy.Symbol] = set()
    for member, placement in made.places.items():
        node = dependences.compute(member)
        if isinstance(node, Contract):
            left, right = (free_axes(side) for side in substitute_all(node.exprs, placement, made.space.sizes))
            found |= left ^ right
    return frozenset(found & spread)


def counts_of(dependences: Dependences, made: Stream | Cluster, capabilities: Capabilities) -> list[int]:
    """Into how many parts the walk of a stream is best cut, most wanted first; none where it stays whole.

    Parts that are all of whole blocks, however few, come last: some walks can be cut only so.
    """
    if len(made.space.reduced) != 1:
        return []
    length, there = made.space.reduced[0].size, max(1, programs(dependences, made))
    wanted = min(capabilities.parallelism // there, dependences.estimate(length) // SHORTEST)
    if wanted < 2:
        return []
    counts = [wanted]
    if length.is_Integer:
        whole = [d for d in range(wanted, 1, -1) if length % (d * BLOCK) == 0][:1]
        near = [count for count in whole if 4 * count > 3 * wanted]
        counts = near or [-(-int(length) // int(length_of_part(length, wanted))), *whole]
    uncut = time_in_parts(dependences, made, 1, capabilities)
    return [count for count in counts if time_in_parts(dependences, made, count, capabilities) < uncut]


def time_in_parts(dependences: Dependences, made: Stream | Cluster, parts: int, capabilities: Capabilities) -> float:
    """Microseconds that a stream takes in so many parts, with its launches and the way of its sums through memory."""
    there = parts * max(1, programs(dependences, made))
    slots = capabilities.parallelism  # what a last round leaves idle is not counted
    walk = capabilities.launch_us + walk_time(dependences, made, capabilities) / busy(min(there, slots), slots)
    if parts == 1:
        return walk
    walked = {axis.symbol for axis in made.space.reduced}
    sums = 0
    for member, at in made.places.items():
        node = dependences.compute(member)
        if any(walked & at[axis.symbol].free_symbols for axis in node.over):
            sums += math.prod(dependences.estimate(axis.size) for axis in node.axes)
    return walk + capabilities.launch_us + 2 * 4 * parts * sums / capabilities.bandwidth


def length_of_part(walked: sympy.Expr, parts: int) -> sympy.Expr:
    """The length of each part of an axis: what divides it, or whole blocks of which the last part may lack some.

    >>> length_of_part(sympy.Integer(4096), 16), length_of_part(sympy.Integer(4099), 16)
    (256, 320)
    """
    if walked.is_Integer and walked % parts == 0:
        return walked / parts
    return BLOCK * FloorDiv(walked + parts * BLOCK - 1, sympy.Integer(parts * BLOCK))


def time_alone(dependences: Dependences, position: int, capabilities: Capabilities) -> float:
    """Microseconds that a product takes with its operands in memory, on the whole device; 0 for anything else."""
    node = dependences.compute(position)
    if not isinstance(node, Contract):
        return 0.0
    moved = sum(dependences.bytes(load.buffer) for load in {*dependences.loads[position]})
    return max(product_time(dependences, position, capabilities), moved / capabilities.bandwidth)


def walk_time(dependences: Dependences, made: Stream | Cluster, capabilities: Capabilities) -> float:
    """Microseconds that the walk of a stream takes if it keeps the whole device busy."""
    outs = {dependences.compute(p).out for p in made.places}
    taken = {load.buffer for p in made.places for load in dependences.loads[p]} - outs
    moved = sum(map(dependences.bytes, taken))
    products = sum(
        product_time(dependences, p, capabilities) * (_padding(dependences, made, p) if capabilities.padded else 1.0)
        for p in made.places
    )
    products /= capabilities.streamed
    multiplied = {load.buffer for p in made.places if _is_product(dependences, p) for load in dependences.loads[p]}
    if capabilities.alignment > 1 and any(is_odd(dependences.program.buffers[name]) for name in multiplied & taken):
        products /= capabilities.odd_rows.walked
    return max(products + sum(_work(dependences, p, capabilities) for p in made.places), moved / capabilities.bandwidth)


def _padding(dependences: Dependences, made: Stream | Cluster, position: int) -> float:
    """How many times as many products a stream makes of a contraction, with axes held whole as powers of two."""
    node, space = dependences.compute(position), made.space
    held = {*space.held, *(axis.symbol for axis in space.private)}
    share = 1.0
    for axis in (*node.axes, *node.over):
        if made.places[position][axis.symbol] in held:
            size = max(1, dependences.estimate(axis.size))
            share *= (1 << (size - 1).bit_length()) / size
    return share


def product_time(dependences: Dependences, position: int, capabilities: Capabilities) -> float:
    """Microseconds that the matrix units take for a product, by the library; 0 for anything else."""
    node = dependences.compute(position)
    if not isinstance(node, Contract):
        return 0.0
    points = math.prod(dependences.estimate(axis.size) for axis in (*node.axes, *node.over))
    return 2 * points / (capabilities.matrix_flops * capabilities.matrix_share[node.lhs.dtype.itemsize])


def _is_product(dependences: Dependences, position: int) -> bool:
    return isinstance(dependences.node(position), Contract)


def _work(dependences: Dependences, position: int, capabilities: Capabilities) -> float:
    node = dependences.node(position)
    match node:
        case Contract() | Extern() | Chunked():
            return 0.0
        case Map() | Reduce() | Scan() | Scatter():
            points = math.prod(dependences.estimate(axis.size) for axis in (*node.axes, *node.over))
            return cost(*node.exprs) * points / capabilities.flops
        case _:
            assert_never(node)
