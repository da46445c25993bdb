"""Splits a product with few tiles along its reduced axis (split-K).

Input: a cluster around one product; output: the alternative in parts, with its price, or None.  The cut is the same as
in a loop (`partial.py`): each part is a product with one more batch axis; its result is stored in float32, and the
kernel of the epilogue adds the parts.

Refused: products whose tiles keep the device busy, sums too short to split, symbolic sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from fusion.codegen.target import Capabilities, Target, busy
from fusion.lowering.ir.program import Contract, Reduce
from fusion.schedule.clusters.alternatives import Alternative, alone, moved
from fusion.schedule.clusters.legality import Cluster, single
from fusion.schedule.clusters.profit import Prices
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.kernels import kernel_of
from fusion.schedule.launches.last_block import MOST_PARTS, part_axis
from fusion.schedule.reductions.partial import cut_cluster, with_cuts

SUM_BLOCK = 64
"""The length of parts is a multiple of this: the largest block of the sum that any kernel processes at once."""
SHORTEST_PART = 8 * SUM_BLOCK
"""The shortest part: below it, filling the pipeline takes longer than the product."""
FEWEST_ROWS = 2
"""The number of rows or columns below which enough programs sum a product without matrix units.

Unless several numbers are packed in an element of the matrix: unpacking costs more than the sums.

(measured: docs/performance.md, `FEWEST_ROWS`)
"""
SUMMED = 4
"""The number of rows or columns up to which a single product may be summed without matrix units."""


def split_k(prices: Prices, cluster: Cluster, products: Mapping[int, Contract], target: Target) -> Alternative | None:
    """Return split-K of the only product of `cluster` as an alternative; None if it occupies no more of the device."""
    if len(products) != 1 or len(cluster.space.reduced) != 1:
        return None
    ((position, product),) = products.items()
    packed = _is_packed(prices, cluster, product)
    count = parts_of(product, prices.capabilities)
    if count < 2 or (min(_sides(product)) < FEWEST_ROWS and not packed):
        return None
    dependences = prices.dependences
    product_alone = single(dependences, prices.capabilities, position)
    (axis,) = product_alone.space.reduced
    split = cut_cluster(dependences, product_alone, axis, axis.size / count, count)
    if split is None:
        return None
    alternative = Alternative(f"in {count} parts", 0.0, split.instead, split.buffers, split.took)
    predicted, _ = prices.alike.of_first(
        "split-K", cluster, lambda: _price(prices, cluster, product, alternative, target)
    )
    return replace(alternative, predicted=predicted)


def parts_of(product: Contract, capabilities: Capabilities) -> int:
    """Return the best number of equal parts of a product's sum; 1 for no split.

    More parts fill the device with tiles, and leave less of it idle in the last wave; but each is written and read.
    """
    sizes = [axis.size for axis in (*product.axes, *product.over)]
    if len(product.over) != 1 or not all(size.is_Integer and size > 0 for size in sizes):
        return 1
    rows, columns = _sides(product)
    results, length = math.prod(int(axis.size) for axis in product.axes), int(product.over[0].size)
    batch = results // (rows * columns)
    counts = [
        count for count in range(1, length // SHORTEST_PART + 1) if count == 1 or length % (count * SUM_BLOCK) == 0
    ]
    if min(rows, columns) < SUM_BLOCK:
        room = capabilities.narrow_tiles * capabilities.parallelism // capabilities.programs_per_multiprocessor
        tiles = batch * math.ceil(max(rows, columns) / SUM_BLOCK)
        return max((count for count in counts if count * tiles <= room and count <= MOST_PARTS), default=1)
    high, wide = capabilities.tiles.halved
    tiles = batch * math.ceil(rows / high) * math.ceil(columns / wide)
    rates = capabilities.rates
    multiplied = rates.product_us_of(2 * results * length, product.lhs.dtype.itemsize)

    def time(count: int) -> float:
        adding = rates.price(8 * count * results).total if count > 1 else 0.0
        return multiplied / busy(tiles * count, capabilities.parallelism) + adding

    return min(counts, key=time, default=1)


def _is_packed(prices: Prices, cluster: Cluster, product: Contract) -> bool:
    """Return whether less than a byte is read for each number of the larger operand."""
    sizes = [axis.size for axis in (*product.axes, *product.over)]
    if not all(size.is_Integer and size > 0 for size in sizes):
        return False
    return prices.traffic(cluster)[0] * min(_sides(product)) < math.prod(map(int, sizes))


def _sides(product: Contract) -> tuple[int, int]:
    """Return the numbers of rows and columns."""
    rows, columns = (
        math.prod(int(axis.size) for axis in product.axes if axis.symbol in side)
        for side in (product.rows, product.columns)
    )
    return rows, columns


def _price(prices: Prices, cluster: Cluster, product: Contract, way: Alternative, target: Target) -> float:
    """Return the microseconds of the parts, and of their sum and epilogue, in a launch of its own or not."""
    capabilities = prices.capabilities
    parts_cluster = Cluster(tuple(way.instead), cluster.space, {})
    program = alone(prices.dependences.program, parts_cluster.members)
    changed = with_cuts(program, [moved(parts_cluster.members, way)])
    dependences = Dependences(changed)
    inner = Prices(dependences, capabilities)
    parts = next(k for k, node in enumerate(changed.nodes) if isinstance(node, Contract))
    kernel = kernel_of(inner, single(dependences, capabilities, parts)).kernel
    total = next(node for node in changed.nodes if isinstance(node, Reduce))
    sums = 4 * math.prod(int(axis.size) for axis in (*total.axes, *total.over))
    multiplied, share = prices.contraction(cluster, product), target.efficiency(kernel)
    if min(_sides(product)) < SUM_BLOCK:
        share = min(share, capabilities.narrow_share)
    first = capabilities.rates.price(sum(prices.traffic(cluster)) + sums, products=multiplied, share=share)
    axis = part_axis(kernel)
    # Unpacking is not in that kernel yet: with it, the matrix units are used for few rows too.
    packed = min(_sides(product)) <= SUMMED and _is_packed(prices, cluster, product)
    in_one_launch = axis is not None and (packed or target.can_reduce_in_last_block(kernel, axis.symbol))
    adding = capabilities.waiting if in_one_launch else 1
    return first.total + capabilities.rates.price(sums, launches=adding).total
