"""Efficiency: how a generated contraction compares with the library's, so that the scheduler can price either.

What enters is a contraction kernel over block dimensions; what leaves is a share of the library's speed with aligned
rows.  The shares are the device's (`ProductSpeeds`).  With descriptors they are as `persistent` says.  Several products
in one loop are slower, unless they are computed as one.  Rows that do not start at multiples of 16 bytes defeat
asynchronous copies.  A product of up to four rows is bound by memory, given two rows of the matrix per multiprocessor.
"""

from __future__ import annotations

import math

import torch

from fusion.codegen.numerics import Numerics
from fusion.codegen.target import busy
from fusion.codegen.triton.blocks import Blocked, Config, extent, full_rounds, programs
from fusion.codegen.triton.choices import contractions, narrow, persistent, vectors
from fusion.codegen.triton.devices import Device, speeds
from fusion.codegen.triton.products import descriptors
from fusion.lowering.expr import Expr, Index, loads
from fusion.lowering.indexing import coefficient
from fusion.lowering.kernel import Role
from fusion.lowering.scalar_ops import HALVES


def efficiency(blocked: Blocked, numerics: Numerics) -> float:
    """The share of the library's speed at which this kernel's contraction runs.

    Where its rows or columns are walked, to be folded or contracted again, there is no library to compare with: then it
    is the share of the speed of the matrix units.
    """
    dots, known = blocked.dots, speeds(blocked.device).products
    if not dots:
        return _of_sums(blocked)
    if blocked.chained:
        share = known.chained if descriptors.matrices(blocked) else known.chained_pointers
        return share * _others(blocked.device, numerics, chained=True).get(dots[0].args[0].dtype, 1.0)
    operands = [load for dot in dots for load in loads(*dot.args)]
    dtype, share, others = dots[0].args[0].dtype, known.pointers, _others(blocked.device, numerics)
    if dtype in others:
        share = others[dtype] * (known.several if len(dots) > 1 else 1.0)
    if descriptors.applies(blocked):
        share = persistent.reached(blocked)
        share *= known.several if len(dots) > 1 and descriptors.stack_of(blocked) is None else 1.0
        return share * _occupied(blocked, numerics)
    if not all(_aligned(blocked, load.index[0], load.dtype.itemsize) for load in operands):
        share = min(share, known.misaligned)
    share *= _occupied(blocked, numerics)
    return min(share, _fetched(blocked, numerics)) if dtype in HALVES else share


def waits(blocked: Blocked, numerics: Numerics) -> bool:
    """Do the matrix units wait while the end of a block is computed, which the share says nothing of?

    So they do through pointers.  H200, 200704 rows, 96 to 384 columns: with GELU 210 µs, and 326 with its gradient; the
    library's product is 53 of 171 and 213.
    """
    if not blocked.dots or blocked.chained or blocked.dots[0].args[0].dtype in _others(blocked.device, numerics):
        return False
    return not descriptors.applies(blocked)


def _fetched(blocked: Blocked, numerics: Numerics) -> float:
    """The share at which the cache brings operands of 16 bits: the smaller the blocks, the more often it brings each.

    Against what the product, or memory, takes at full speed.  (H200, bf16, 384 × 196 × 49152 in blocks of 16 × 64: 170
    µs for 0.76 GB.)
    """
    known, dots, config = speeds(blocked.device), blocked.dots, _default(blocked, numerics)
    m, n, size = config.block("m"), config.block("n"), dots[0].args[0].dtype.itemsize
    length = math.prod(extent(dim.size) for dim in blocked.sides(dots[0])[2:])
    blocks = programs(blocked, config)
    fetched = blocks * (m + len(dots) * n) * length * size / known.cache_bandwidth
    multiplied = 2 * len(dots) * math.prod(extent(dim.size) for dim in blocked.grid()) * length / known.matrix_flops
    moved = sum(extent(param.extent) * param.dtype.itemsize for param in blocked.kernel.params)
    return max(multiplied, moved / known.bandwidth) / fetched


def _occupied(blocked: Blocked, numerics: Numerics) -> float:
    """The share of its speed at which the device computes the blocks that there are; a library cuts long sums instead.

    Of split float32 two programs share a multiprocessor, and hide half of what the last round leaves idle.
    """
    blocks, count = programs(blocked, _default(blocked, numerics)), blocked.device.multiprocessors
    if narrow.candidates(blocked):
        return min(1.0, math.sqrt(blocks / (speeds(blocked.device).products.narrow_together * count)))
    split = blocked.dots[0].args[0].dtype is torch.float32 and not numerics.tf32
    return busy(blocks, 2 * count) if split else min(1.0, blocks / count)


def _default(blocked: Blocked, numerics: Numerics) -> Config:
    fetched = persistent.candidates(blocked)
    return (*narrow.candidates(blocked), *fetched, *contractions.candidates(blocked, numerics))[0]


def speed(blocked: Blocked, config: Config) -> float:
    """The share of the speed of the device, or of the library's, that is predicted for one configuration.

    What is not a contraction is bound by memory, at the share of the device that its last round of blocks leaves busy.
    """
    blocks, device = programs(blocked, config), blocked.device
    if not blocked.dots:
        return full_rounds(blocks, device.multiprocessors * max(1, device.warps // config.num_warps))
    if config.persistent and not blocked.chained:
        return persistent.speed(blocked, config)
    known = speeds(device).products
    share = known.pointers * known.others().get(blocked.dots[0].args[0].dtype, 1.0)
    sums = config.block("m") * config.block("n")
    share *= min(1.0, math.sqrt(sums) / 128)  # the smaller a block, the more often operands are fetched
    return share * full_rounds(blocks, device.multiprocessors)


def _others(device: Device, numerics: Numerics, *, chained: bool = False) -> dict[torch.dtype, float]:
    """The dtypes that do not run as halves do."""
    known = speeds(device).products
    rounded = {torch.float32: known.tf32_chained if chained else known.tf32} if numerics.tf32 else {}
    return known.others() | rounded


def _of_sums(blocked: Blocked) -> float:
    """The share for a contraction that has become sums of products: fewer rows than programs leave some idle."""
    rows = math.prod(extent(dim.size) for dim in blocked.grid())
    length = math.prod(extent(dim.size) for dim in blocked.dims if dim.role is not Role.GRID)
    size = max(blocked.kernel.params, key=lambda param: extent(param.extent)).dtype.itemsize
    known = speeds(blocked.device).products
    share = known.packed_sums if vectors.is_packed(blocked) else 1.0
    share *= known.few_long_rows if length * size > known.long_row else known.few_rows
    return share * min(1.0, rows / (2 * blocked.device.multiprocessors))


def _aligned(blocked: Blocked, offset: Index, size: int) -> bool:
    """Does every row of a matrix of elements of `size` bytes start at a multiple of 16 bytes?

    Neighbours may lie as far apart as there are products: these share the elements of a row (`packed`).
    """
    if isinstance(offset, Expr):
        return True
    strides = [coefficient(offset, dim.symbol) for dim in blocked.dims]
    near = (0, 1, len(blocked.dots))
    return all(s is None or s in near or not s.is_Integer or int(s) * size % 16 == 0 for s in strides)
