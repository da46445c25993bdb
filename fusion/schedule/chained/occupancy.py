"""Prices the loop of a chain: the number of its programs, its time, and the best number of parts.

Input: a chain, a candidate or a cluster; output: estimates, symbolic sizes at their hints.  With fewer programs than
keep the device busy, a loop takes proportionally longer.  Split into parts that run side by side it does not, for
another launch, which merges them (see `split_loops.py`).
"""

from __future__ import annotations

import math

import sympy
from typing_extensions import assert_never

from fusion.codegen.chained import narrow_factors
from fusion.codegen.price import Price
from fusion.codegen.target import Capabilities, busy, in_waves
from fusion.lowering.indexing import FloorDiv, substitute_all
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import free_axes
from fusion.lowering.ir.program import Contract, Extern, Map, Reduce, Scan, Scatter
from fusion.schedule.chained.place_producers import Chain
from fusion.schedule.clusters.expand import values_of
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.clusters.misaligned_rows import is_odd
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.reductions.one_loop import counting, follow
from fusion.schedule.reductions.skipped_blocks import counts_where
from fusion.schedule.reductions.skipped_share import expected_share

LOOP_BLOCK = 64
"""Elements of the looped axis that a program processes at once, and rows of a tile: parts end with a block."""

SHORTEST_PART = 4 * LOOP_BLOCK
"""The shortest part: below it, filling the pipeline of a loop takes longer than the loop."""


def programs(dependences: Dependences, chain: Chain | Cluster) -> int:
    """Return the number of programs of a chain's loop without split: blocks of rows, for each point of other axes."""
    spread, rows = chain.space.spread, rows_of(dependences, chain)
    count = math.prod(dependences.estimate(axis.size) for axis in spread if axis.symbol not in rows)
    return count * -(
        -math.prod(dependences.estimate(axis.size) for axis in spread if axis.symbol in rows) // LOOP_BLOCK
    )


def rows_of(dependences: Dependences, chain: Chain | Cluster) -> frozenset[sympy.Symbol]:
    """Return the grid or outer axes that only one side of some product varies along: they are rows of its tile."""
    spread = {axis.symbol for axis in chain.space.parallel} - chain.space.held
    one_sided: set[sympy.Symbol] = set()
    for member, placement in chain.places.items():
        node = dependences.compute(member)
        if isinstance(node, Contract):
            left, right = (free_axes(side) for side in substitute_all(node.exprs, placement, chain.space.sizes))
            one_sided |= left ^ right
    return frozenset(one_sided & spread)


def counts_of(dependences: Dependences, chain: Chain | Cluster, capabilities: Capabilities) -> list[int]:
    """Return the counts of parts into which splitting a chain's loop pays off, best first; empty if none does.

    Counts with whole blocks only, however few, come last: some loops can be split only so.
    """
    if len(chain.space.reduced) != 1 or chain.space.outer:
        return []
    length, blocks = chain.space.reduced[0].size, max(1, programs(dependences, chain))
    most = min(capabilities.parallelism // blocks, dependences.estimate(length) // SHORTEST_PART)
    if most < 2:
        return []
    counts = [most]
    if length.is_Integer:
        even = [d for d in range(most, 1, -1) if length % (d * LOOP_BLOCK) == 0][:1]
        near = [count for count in even if 4 * count > 3 * most]
        counts = near or [-(-int(length) // int(length_of_part(length, most))), *even]
    uncut = time_in_parts(dependences, chain, 1, capabilities)
    return [count for count in counts if time_in_parts(dependences, chain, count, capabilities) < uncut]


def time_in_parts(
    dependences: Dependences, chain: Chain | Cluster, parts: int, capabilities: Capabilities, share: float = 1.0
) -> float:
    """Return the microseconds of a chain in this many parts, with its launches and its sums' trip through memory.

    `share`: of the blocks of its loop that count.
    """
    count = parts * max(1, programs(dependences, chain))
    slots = capabilities.parallelism
    rates = capabilities.rates
    price = loop_price(dependences, chain, capabilities, share)
    used = busy(min(count, slots), slots)  # a partly idle last wave is not counted,
    if chain.space.outer:  # except of programs that take all rows
        used = in_waves(count, slots)
    loop_us = rates.launch_us + price.busy / used
    if parts == 1:
        return loop_us
    looped = {axis.symbol for axis in chain.space.reduced}
    sums = 0
    for member, at in chain.places.items():
        node = dependences.compute(member)
        if any(looped & at[axis.symbol].free_symbols for axis in node.over):
            sums += math.prod(dependences.estimate(axis.size) for axis in node.axes)
    return loop_us + rates.price(2 * 4 * parts * sums).total


def length_of_part(length: sympy.Expr, parts: int) -> sympy.Expr:
    """Return the length of each part of an axis: its equal share, or whole blocks, of which the last part may have
    fewer.

    >>> length_of_part(sympy.Integer(4096), 16), length_of_part(sympy.Integer(4099), 16)
    (256, 320)
    """
    if length.is_Integer and length % parts == 0:
        return length / parts
    return LOOP_BLOCK * FloorDiv(length + parts * LOOP_BLOCK - 1, sympy.Integer(parts * LOOP_BLOCK))


def time_alone(dependences: Dependences, position: int, capabilities: Capabilities) -> float:
    """Return the microseconds of a product with its operands in memory, on the full device; 0 for other nodes."""
    node = dependences.compute(position)
    if not isinstance(node, Contract):
        return 0.0
    moved = sum(dependences.bytes(load.buffer) for load in {*dependences.loads[position]})
    return capabilities.rates.price(moved, products=product_time(dependences, position, capabilities)).busy


def share_that_counts(dependences: Dependences, chain: Chain) -> float:
    """Return the share of the blocks of a chain's loop that its masks are expected to leave."""
    looped = [axis.symbol for axis in chain.space.reduced]
    followed = follow(values_of(dependences, Cluster.of(chain.space, chain.places))[0], looped, ())
    if isinstance(followed, str):
        return 1.0
    where = counts_where(counting(followed, chain.space.outer), looped, added=True)
    sizes = {symbol: dependences.estimate(size) for symbol, size in chain.space.sizes.items()}
    return expected_share(where, looped, sizes)


def loop_price(
    dependences: Dependences, chain: Chain | Cluster, capabilities: Capabilities, share: float = 1.0
) -> Price:
    """Return the price of a chain's loop if it keeps the full device busy; `share`: of its blocks that count."""
    outs = {dependences.compute(p).out for p in chain.places}
    inputs = {load.buffer for p in chain.places for load in dependences.loads[p]} - outs
    moved = sum(map(dependences.bytes, inputs)) + share * _added_bytes(dependences, chain, capabilities)
    products = sum(
        product_time(dependences, p, capabilities) * (_padding(dependences, chain, p) if capabilities.padded else 1.0)
        for p in chain.places
    )
    products /= capabilities.chained
    multiplied = {load.buffer for p in chain.places if _is_product(dependences, p) for load in dependences.loads[p]}
    if capabilities.alignment > 1 and any(is_odd(dependences.program.buffers[name]) for name in multiplied & inputs):
        products /= capabilities.misaligned_rows.chained
    scalars = sum(scalar_time(dependences, p, capabilities) for p in chain.places)
    return capabilities.rates.price(moved, products=share * products, scalars=share * scalars)


def _added_bytes(dependences: Dependences, chain: Chain | Cluster, capabilities: Capabilities) -> int:
    """Return the bytes that are read and written where blocks are added to results along the loop of a chain."""
    outer, total = chain.space.outer, 0
    for member, at in chain.places.items():
        node = dependences.compute(member)
        folded = [axis for axis in node.over if outer & at[axis.symbol].free_symbols]
        if folded:
            points = math.prod(dependences.estimate(axis.size) for axis in node.axes)
            blocks = -(-math.prod(dependences.estimate(axis.size) for axis in folded) // capabilities.outer_block)
            total += 2 * 4 * points * blocks
    return total


def _padding(dependences: Dependences, chain: Chain | Cluster, position: int) -> float:
    """Return the ratio of a chain's multiplications, with held axes padded to powers of two, to a contraction's."""
    node, space = dependences.compute(position), chain.space
    held = {*space.held, *(axis.symbol for axis in space.private)}
    factor = 1.0
    for axis in (*node.axes, *node.over):
        if chain.places[position][axis.symbol] in held:
            size = max(1, dependences.estimate(axis.size))
            factor *= (1 << (size - 1).bit_length()) / size
    return factor


def product_time(dependences: Dependences, position: int, capabilities: Capabilities) -> float:
    """Return the microseconds of a product on the matrix units, in a GEMM of its own; 0 for other nodes."""
    node = dependences.compute(position)
    if not isinstance(node, Contract):
        return 0.0
    points = math.prod(dependences.estimate(axis.size) for axis in (*node.axes, *node.over))
    lhs, _ = narrow_factors((node.lhs, node.rhs)) if capabilities.narrow else (node.lhs, node.rhs)
    return capabilities.product_us(2 * points, lhs.dtype.itemsize)


def _is_product(dependences: Dependences, position: int) -> bool:
    return isinstance(dependences.node(position), Contract)


def scalar_time(dependences: Dependences, position: int, capabilities: Capabilities) -> float:
    """Return the microseconds of a node's scalar operations; 0 for products."""
    node = dependences.node(position)
    match node:
        case Contract() | Extern() | Chunked():
            return 0.0
        case Map() | Reduce() | Scan() | Scatter():
            points = math.prod(dependences.estimate(axis.size) for axis in (*node.axes, *node.over))
            return capabilities.rates.scalar_us(capabilities.rates.cost(*node.exprs) * points)
        case _:
            assert_never(node)
