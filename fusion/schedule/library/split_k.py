"""Splits a product with few tiles along the axis that is summed over (split-K).

Input: a cluster around one product; output: the way to make it in parts, with its price, or None.  It is the same cut
as that of a walk (`partial.py`): each part is a product of its own, of one more batch axis; what it gives is kept in
float32, and added up by the kernel of whatever follows the product.

Refused: products whose tiles keep the device busy, sums too short to be cut, sizes that are not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from fusion.codegen.target import Capabilities, Target, busy
from fusion.lowering.program import Contract, Reduce
from fusion.schedule.clusters.alternatives import Way, alone, moved
from fusion.schedule.clusters.legality import Cluster, single
from fusion.schedule.clusters.profit import Prices
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.kernels import kernel_of
from fusion.schedule.launches.last_block import MOST, part_axis
from fusion.schedule.reductions.partial import cut, with_cuts

BLOCK = 64
"""Parts end with a block of the sum, as long as any kernel takes at once."""
ROWS, COLUMNS = 128, 64
"""A tile of which two share a processor."""
SHORTEST = 8 * BLOCK
"""The shortest part: below it, filling the pipeline takes longer than the product."""
FEWEST = 2
"""Rows or columns below which a product is summed up without matrix units, by programs enough.

Unless several numbers lie in an element of the matrix: taking them apart costs more than the sums.  (One row and int4
weights of 4096 × 14336 in groups, with the launch: 23.8 µs as sums, 20.9 on the matrix units in 4 parts.)
"""
SUMMED = 4
"""Rows or columns up to which a product may be summed up so by itself."""


def in_parts(prices: Prices, cluster: Cluster, products: Mapping[int, Contract], target: Target) -> Way | None:
    """The only product of `cluster` in parts, where that keeps more of the device busy."""
    if len(products) != 1 or len(cluster.space.reduced) != 1:
        return None
    ((position, product),) = products.items()
    packed = _is_packed(prices, cluster, product)
    count = parts_of(product, prices.capabilities)
    if count < 2 or (min(_sides(product)) < FEWEST and not packed):
        return None
    dependences = prices.dependences
    lone = single(dependences, prices.capabilities, position)
    (axis,) = lone.space.reduced
    made = cut(dependences, lone, axis, axis.size / count, count)
    if made is None:
        return None
    way = Way(f"in {count} parts", 0.0, made.instead, made.buffers, made.took)
    return replace(way, predicted=_price(prices, cluster, product, way, target))


def parts_of(product: Contract, capabilities: Capabilities) -> int:
    """Into how many equal parts the sum of a product is best cut; 1 leaves it whole.

    More parts fill the device with tiles, and leave less of it idle in the last round; but each is written and read.
    """
    sizes = [axis.size for axis in (*product.axes, *product.over)]
    if len(product.over) != 1 or not all(size.is_Integer and size > 0 for size in sizes):
        return 1
    rows, columns = _sides(product)
    results, length = math.prod(int(axis.size) for axis in product.axes), int(product.over[0].size)
    batch = results // (rows * columns)
    counts = [count for count in range(1, length // SHORTEST + 1) if count == 1 or length % (count * BLOCK) == 0]
    if min(rows, columns) < BLOCK:
        room = capabilities.narrow_tiles * capabilities.parallelism // 2
        tiles = batch * math.ceil(max(rows, columns) / BLOCK)
        return max((count for count in counts if count * tiles <= room and count <= MOST), default=1)
    tiles = batch * math.ceil(rows / ROWS) * math.ceil(columns / COLUMNS)
    rate = capabilities.matrix_flops * capabilities.matrix_share[product.lhs.dtype.itemsize]

    def time(count: int) -> float:
        adding = capabilities.launch_us + 8 * count * results / capabilities.bandwidth if count > 1 else 0.0
        return 2 * results * length / rate / busy(tiles * count, capabilities.parallelism) + adding

    return min(counts, key=time, default=1)


def _is_packed(prices: Prices, cluster: Cluster, product: Contract) -> bool:
    """Is less read than a byte for each number of the larger operand?"""
    sizes = [axis.size for axis in (*product.axes, *product.over)]
    if not all(size.is_Integer and size > 0 for size in sizes):
        return False
    return prices.traffic(cluster)[0] * min(_sides(product)) < math.prod(map(int, sizes))


def _sides(product: Contract) -> tuple[int, int]:
    """How many rows and columns there are."""
    rows, columns = (
        math.prod(int(axis.size) for axis in product.axes if axis.symbol in side)
        for side in (product.rows, product.columns)
    )
    return rows, columns


def _price(prices: Prices, cluster: Cluster, product: Contract, way: Way, target: Target) -> float:
    """Microseconds of the parts, and of what adds them up and computes what follows, in a launch of its own or not."""
    capabilities = prices.capabilities
    lone = Cluster(tuple(way.instead), cluster.space, {})
    program = alone(prices.dependences.program, lone)
    changed = with_cuts(program, [moved(lone, way)])
    dependences = Dependences(changed)
    inner = Prices(dependences, capabilities)
    parts = next(k for k, node in enumerate(changed.nodes) if isinstance(node, Contract))
    kernel = kernel_of(inner, single(dependences, capabilities, parts)).kernel
    total = next(node for node in changed.nodes if isinstance(node, Reduce))
    sums = 4 * math.prod(int(axis.size) for axis in (*total.axes, *total.over))
    multiplied, share = prices.contraction(cluster, product), target.efficiency(kernel)
    if min(_sides(product)) < BLOCK:
        share = min(share, capabilities.narrow_share)
    first = max(multiplied, (sum(prices.traffic(cluster)) + sums) / capabilities.bandwidth) / share
    axis = part_axis(kernel)
    # What takes packed numbers apart is not in that kernel yet: with it, few rows are on the matrix units too.
    packed = min(_sides(product)) <= SUMMED and _is_packed(prices, cluster, product)
    joined = axis is not None and (packed or target.finishes(kernel, axis.symbol))
    adding = capabilities.waiting if joined else 1
    return (1 + adding) * capabilities.launch_us + first + sums / capabilities.bandwidth
