"""Efficiency: how a generated contraction compares with the library's, so that the scheduler can price either.

What enters is a contraction kernel over block dimensions; what leaves is a share of the library's speed with aligned
rows.  The shares were measured on an H200 against cuBLAS, over the shapes of transformer layers (bfloat16 unless said).
With descriptors it is as `persistent` says; aligned pointers reach 0.6.  Several products in one loop have 0.8 of that,
unless they are computed as one.  Rows that do not start at multiples of 16 bytes defeat asynchronous copies: of an odd
vocabulary pointers reach 0.38.  float32 by three TF32 products is 1.4 times as fast as cuBLAS in full float32.  A
product of up to four rows is bound by memory: against the library, sums of products take 1.03 of its speed, 0.93 where
rows are longer than 16 KiB, given two rows of the matrix per multiprocessor.  Attention and its gradients reach 0.55
(64 wide) to 0.8 (128 wide) of the speed of a plain product.
"""

from __future__ import annotations

import math

import torch

from fusion.codegen.target import busy
from fusion.codegen.triton.architecture import Units
from fusion.codegen.triton.blocks import PROGRAMS, Blocked, Config, extent, full_rounds, programs
from fusion.codegen.triton.choices import contractions, narrow, persistent, vectors
from fusion.codegen.triton.products import descriptors
from fusion.lowering.expr import Expr, Index, loads
from fusion.lowering.indexing import coefficient
from fusion.lowering.kernel import Role
from fusion.lowering.scalar_ops import HALVES

POINTERS, MISALIGNED, SEVERAL = 0.6, 0.38, 0.8
FEW_ROWS, FEW_LONG_ROWS, LONG = 1.03, 0.93, 16_384
CHAINED, CHAINED_POINTERS = 0.6, 0.5
CACHE, MEMORY, MULTIPLIED = 7e6, 4.3e6, 7.5e8  # bytes per µs from the L2 cache and from memory, operations per µs
WARPS = 64  # that share a multiprocessor
NARROW_TOGETHER = 3  # programs that must share one to hide how a narrow product converts what it loads
PACKED_SUMS = 0.4  # what is left of the speed of sums where numbers that share a byte are taken apart
TF32, TF32_CHAINED = 0.25, 0.37  # against cuBLAS in TF32, where descriptors are for halves only
OTHER_DTYPES = {torch.float32: 1.4, torch.float64: 0.25, torch.int8: 0.6}


def efficiency(blocked: Blocked, units: Units) -> float:
    """The share of the library's speed at which this kernel's contraction runs.

    Where its rows or columns are walked, to be folded or contracted again, there is no library to compare with: then it
    is the share of the speed of the matrix units.
    """
    dots = blocked.dots
    if not dots:
        return _of_sums(blocked)
    if blocked.chained:
        share = CHAINED if descriptors.matrices(blocked, units.arch) else CHAINED_POINTERS
        return share * _others(units, chained=True).get(dots[0].args[0].dtype, 1.0)
    operands = [load for dot in dots for load in loads(*dot.args)]
    dtype, share = dots[0].args[0].dtype, POINTERS
    if dtype in _others(units):
        share = _others(units)[dtype] * (SEVERAL if len(dots) > 1 else 1.0)
    if descriptors.applies(blocked, units.arch):
        share = persistent.reached(blocked)
        share *= SEVERAL if len(dots) > 1 and descriptors.stack_of(blocked) is None else 1.0
        return share * _occupied(blocked, units)
    if not all(_aligned(blocked, load.index[0], load.dtype.itemsize) for load in operands):
        share = min(share, MISALIGNED)
    share *= _occupied(blocked, units)
    return min(share, _fetched(blocked, units)) if dtype in HALVES else share


def waits(blocked: Blocked, units: Units) -> bool:
    """Do the matrix units wait while the end of a block is computed, which the share says nothing of?

    So they do through pointers.  H200, 200704 rows, 96 to 384 columns: with GELU 210 µs, and 326 with its gradient; the
    library's product is 53 of 171 and 213.
    """
    if not blocked.dots or blocked.chained or blocked.dots[0].args[0].dtype in _others(units):
        return False
    return not descriptors.applies(blocked, units.arch)


def _fetched(blocked: Blocked, units: Units) -> float:
    """The share at which the cache brings operands of 16 bits: the smaller the blocks, the more often it brings each.

    Against what the product, or memory, takes at full speed.  (H200, bf16, 384 × 196 × 49152 in blocks of 16 × 64: 170
    µs for 0.76 GB.)
    """
    dots, config = blocked.dots, _default(blocked, units)
    m, n, size = config.block("m"), config.block("n"), dots[0].args[0].dtype.itemsize
    length = math.prod(extent(dim.size) for dim in blocked.sides(dots[0])[2:])
    blocks = programs(blocked, config)
    fetched = blocks * (m + len(dots) * n) * length * size / CACHE
    multiplied = 2 * len(dots) * math.prod(extent(dim.size) for dim in blocked.grid()) * length / MULTIPLIED
    moved = sum(extent(param.extent) * param.dtype.itemsize for param in blocked.kernel.params) / MEMORY
    return max(multiplied, moved) / fetched


def _occupied(blocked: Blocked, units: Units) -> float:
    """The share of its speed at which the device computes the blocks that there are; a library cuts long sums instead.

    Of split float32 two programs share a multiprocessor, and hide half of what the last round leaves idle.
    """
    blocks = programs(blocked, _default(blocked, units))
    if narrow.candidates(blocked):
        return min(1.0, math.sqrt(blocks / (NARROW_TOGETHER * PROGRAMS)))
    split = blocked.dots[0].args[0].dtype is torch.float32 and not units.tf32
    return busy(blocks, 2 * PROGRAMS) if split else min(1.0, blocks / PROGRAMS)


def _default(blocked: Blocked, units: Units) -> Config:
    fetched = persistent.candidates(blocked, units.arch)
    return (*narrow.candidates(blocked), *fetched, *contractions.candidates(blocked, units))[0]


def speed(blocked: Blocked, config: Config) -> float:
    """The share of the speed of the device, or of the library's, that is predicted for one configuration.

    What is not a contraction is bound by memory, at the share of the device that its last round of blocks leaves busy.
    """
    blocks = programs(blocked, config)
    if not blocked.dots:
        return full_rounds(blocks, PROGRAMS * max(1, WARPS // config.num_warps))
    if config.persistent and not blocked.chained:
        return persistent.speed(blocked, config)
    share = POINTERS * OTHER_DTYPES.get(blocked.dots[0].args[0].dtype, 1.0)
    sums = config.block("m") * config.block("n")
    share *= min(1.0, math.sqrt(sums) / 128)  # the smaller a block, the more often operands are fetched
    return share * full_rounds(blocks, PROGRAMS)


def _others(units: Units, *, chained: bool = False) -> dict[torch.dtype, float]:
    """The dtypes that do not run as halves do."""
    return {**OTHER_DTYPES, torch.float32: TF32_CHAINED if chained else TF32} if units.tf32 else OTHER_DTYPES


def _of_sums(blocked: Blocked) -> float:
    """The share for a contraction that has become sums of products: fewer rows than programs leave some idle."""
    rows = math.prod(extent(dim.size) for dim in blocked.grid())
    length = math.prod(extent(dim.size) for dim in blocked.dims if dim.role is not Role.GRID)
    size = max(blocked.kernel.params, key=lambda param: extent(param.extent)).dtype.itemsize
    share = PACKED_SUMS if vectors.is_packed(blocked) else 1.0
    return share * (FEW_LONG_ROWS if length * size > LONG else FEW_ROWS) * min(1.0, rows / (2 * PROGRAMS))


def _aligned(blocked: Blocked, offset: Index, size: int) -> bool:
    """Does every row of a matrix of elements of `size` bytes start at a multiple of 16 bytes?

    Neighbours may lie as far apart as there are products: these share the elements of a row (`packed`).
    """
    if isinstance(offset, Expr):
        return True
    strides = [coefficient(offset, dim.symbol) for dim in blocked.dims]
    near = (0, 1, len(blocked.dots))
    return all(s is None or s in near or not s.is_Integer or int(s) * size % 16 == 0 for s in strides)
