"""Predicts the shares of the device's speed that the forms' prices are composed of.

Input: a kernel over block dimensions; output: a share: of the speed of the device, or for contractions, of the speed of
the library's kernel with aligned rows.  The shares are the device's (`ProductSpeeds`).  Rows that do not start at
multiples of 16 bytes rule out asynchronous copies.  A product of up to four rows is bound by memory, if the matrix has
two rows per multiprocessor.
"""

from __future__ import annotations

import math
from collections import Counter

import torch

from fusion.codegen.numerics import Numerics
from fusion.codegen.target import busy
from fusion.codegen.triton.blocks import Blocked, Config, extent, full_rounds, programs
from fusion.codegen.triton.blocks.dims import constant_quotients
from fusion.codegen.triton.devices import Device, speeds
from fusion.codegen.triton.forms import windows
from fusion.codegen.triton.forms.traffic import is_packed
from fusion.lowering.indexing import ZERO, coefficient
from fusion.lowering.ir.expr import Expr, Index, Load, free_axes, loads
from fusion.lowering.ir.kernel import Role
from fusion.lowering.ir.scalar_ops import HALVES

ROWS_OF_GROUP = 64
"""Rows that a group of four warps multiplies at least (`wgmma`)."""


def of_config(blocked: Blocked, config: Config) -> float:
    """Return the predicted share of the device's speed for a configuration that loads through pointers.

    A kernel without contraction is bound by memory; its share is lower by the multiprocessors that its last wave of
    blocks leaves idle.
    """
    blocks, device = programs(blocked, config), blocked.device
    if not blocked.dots:
        return full_rounds(blocks, device.multiprocessors * max(1, device.warps // config.num_warps))
    measured = speeds(device).products
    share = measured.pointers * measured.others().get(blocked.dots[0].args[0].dtype, 1.0)
    sums = config.block("m") * config.block("n")
    share *= min(1.0, math.sqrt(sums) / 128)  # the smaller a block, the more often operands are loaded
    return share * full_rounds(blocks, device.multiprocessors)


def of_product(blocked: Blocked, numerics: Numerics, config: Config, occupied: float) -> float:
    """Return the speed of a product through pointers relative to the library's, on the share `occupied` of the device.

    Several products in one loop are slower, and so are blocks of few rows in dtypes whose products do not wait for
    their operands.  An operand that is computed from several blocks takes the room of these: as many fewer steps are in
    flight (as in `ChainSpeed.share`).
    """
    dots, measured = blocked.dots, speeds(blocked.device).products
    operands = [load for dot in dots for load in loads(*dot.args)]
    dtype, share, others = dots[0].args[0].dtype, measured.pointers, other_dtypes(blocked.device, numerics)
    if dtype in others:
        share = others[dtype] * (measured.several if len(dots) > 1 else 1.0)
        share *= measured.by_warps if dtype is not torch.float64 and config.block("m") < ROWS_OF_GROUP else 1.0
    if not all(_aligned(blocked, load.index[0], load.dtype.itemsize) for load in operands):
        share = min(share, measured.misaligned)
    share *= occupied * (measured.stepped if _waits_for_vectors(blocked) else 1.0)
    if dtype in HALVES:
        full = _at_full_speed(blocked)
        share = min(share, full / _from_cache(blocked, config))
        if windows.are_rows(blocked):
            share = min(share, full * speeds(blocked.device).flops / windows.loading(blocked, config))
    return share / _fetched(blocked, config)


def _waits_for_vectors(blocked: Blocked) -> bool:
    """Return whether an operand is computed from a vector along the sum, which no asynchronous copy loads."""
    over = blocked.sides(blocked.dots[0])[2]
    sides = {dim.symbol for dim in blocked.dims if dim is not over and dim.name != "b"}
    operands = (load for dot in blocked.dots for arg in dot.args for load in loads(arg))
    return any(over.symbol in free_axes(load) and sides.isdisjoint(free_axes(load)) for load in operands)


def _fetched(blocked: Blocked, config: Config) -> float:
    """Return how many blocks a step of the loop loads for each operand that it loads at all.

    Loads under different conditions are choices, as in a concatenation: of these, an element is loaded once.
    """
    counts: list[int] = []
    for operand in {arg for dot in blocked.dots for arg in dot.args}:
        by_mask = Counter(load.mask for load in loads(operand) if _is_block(blocked, config, load))
        always = by_mask.pop(None, 0)
        counts.append(always + max(by_mask.values(), default=0))
    loaded = [count for count in counts if count]
    return sum(loaded) / len(loaded) if loaded else 1.0


def _is_block(blocked: Blocked, config: Config, load: Load) -> bool:
    """Return whether a load differs within a step along the summed dimension, and along rows or columns, too."""
    over, axes = blocked.sides(blocked.dots[0])[2], free_axes(load)
    if not isinstance(load.index[0], Expr):
        constant = constant_quotients(load.index[0], over, config.block(over.name))
        varying = load.index[0].xreplace(dict.fromkeys(constant, ZERO)).free_symbols
        axes = frozenset(varying) | (free_axes(load.mask) if load.mask is not None else frozenset())
    sides = {dim.symbol for dim in blocked.dims if dim is not over and dim.name not in ("b", "s")}
    return over.symbol in axes and not sides.isdisjoint(axes)


def occupied(blocked: Blocked, numerics: Numerics, config: Config) -> float:
    """Return the share of the device's speed that so few blocks reach; the library would use split-K instead.

    With split float32 two programs share a multiprocessor, and hide half of the idle time of the last round.
    """
    blocks, count = programs(blocked, config), blocked.device.multiprocessors
    split = blocked.dots[0].args[0].dtype is torch.float32 and not numerics.tf32
    return busy(blocks, 2 * count) if split else min(1.0, blocks / count)


def other_dtypes(device: Device, numerics: Numerics, *, chained: bool = False) -> dict[torch.dtype, float]:
    """Return the dtypes whose products do not run at the speed of 16-bit floats, with their share of the library's
    speed.
    """
    measured = speeds(device).products
    rounded = {torch.float32: measured.tf32_chained if chained else measured.tf32} if numerics.tf32 else {}
    return measured.others() | rounded


def of_chain(blocked: Blocked, numerics: Numerics, *, described: bool) -> float:
    """Return the share of the speed of the matrix units for a chained product; there is no library to compare with.

    `described`: do operands come through tensor descriptors?
    """
    measured = speeds(blocked.device).products
    share = measured.chained if described else measured.chained_pointers
    dtype = blocked.dots[0].args[0].dtype
    return share * other_dtypes(blocked.device, numerics, chained=True).get(dtype, 1.0)


def of_sums(blocked: Blocked) -> float:
    """Return the share for a contraction computed as sums of products: few rows leave programs idle."""
    rows = math.prod(extent(dim.size) for dim in blocked.grid())
    length = math.prod(extent(dim.size) for dim in blocked.dims if dim.role is not Role.GRID)
    size = max(blocked.kernel.params, key=lambda param: extent(param.extent)).dtype.itemsize
    measured = speeds(blocked.device).products
    share = measured.packed_sums if is_packed(blocked) else 1.0
    share *= measured.few_long_rows if length * size > measured.long_row else measured.few_rows
    return share * min(1.0, rows / (2 * blocked.device.multiprocessors))


def _at_full_speed(blocked: Blocked) -> float:
    """Return the microseconds at full speed: of the matrix units or of memory, whichever is slower."""
    measured, dots = speeds(blocked.device), blocked.dots
    length = math.prod(extent(dim.size) for dim in blocked.sides(dots[0])[2:])
    multiplied = 2 * len(dots) * math.prod(extent(dim.size) for dim in blocked.grid()) * length / measured.matrix_flops
    moved = sum(extent(param.extent) * param.dtype.itemsize for param in blocked.kernel.params)
    return max(multiplied, moved / measured.bandwidth)


def _from_cache(blocked: Blocked, config: Config) -> float:
    """Return the microseconds in which the cache supplies 16-bit operands: the smaller the blocks, the more often.

    The rate of the cache is `Speeds.cache_bandwidth`.
    """
    m, n, size = config.block("m"), config.block("n"), blocked.dots[0].args[0].dtype.itemsize
    length = math.prod(extent(dim.size) for dim in blocked.sides(blocked.dots[0])[2:])
    fetched = programs(blocked, config) * (m + len(blocked.dots) * n) * length * size
    return fetched / speeds(blocked.device).cache_bandwidth


def _aligned(blocked: Blocked, offset: Index, size: int) -> bool:
    """Return whether every row of a matrix of elements of `size` bytes starts at a multiple of 16 bytes.

    Neighbours may be as far apart as there are products: these share the elements of a row (`packed`).
    """
    if isinstance(offset, Expr):
        return True
    strides = [coefficient(offset, dim.symbol) for dim in blocked.dims]
    near = (0, 1, len(blocked.dots))
    return all(s is None or s in near or not s.is_Integer or int(s) * size % 16 == 0 for s in strides)
