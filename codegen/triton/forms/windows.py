"""Plans products whose rows are windows of an image of few channels, as in the stem of a convolutional network.

Input: a contraction over block dimensions; output: its blocks, and what its loads cost.  Such windows are not stored:
each element of a row is loaded on its own, of padded ones under conditions on its place.  A warp has 32 rows, so that a
thread has whole rows, and each step of the loop is written out: then the places of its elements are constants.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from fusion.codegen.triton.blocks import Blocked, Config, extent, power_of_two, programs
from fusion.codegen.triton.devices import Feature
from fusion.lowering.indexing import FloorDiv
from fusion.lowering.ir.expr import Expr, Load, loads
from fusion.lowering.ir.scalar_ops import HALVES

_SHAPES = ((128, 128, 32, 4, 2), (128, 64, 32, 4, 2), (128, 32, 16, 4, 2))
"""(m, n, k) blocks, warps, stages, no wider than the result.  (measured: docs/performance.md, `windows`)"""

_LIMITED, _TOGETHER = 64, 3
"""Columns of a block whose registers are limited, so that this many programs share a multiprocessor."""

_LONGEST_RUN = 8
"""Neighbouring elements of a window, at most: longer runs are loaded as vectors."""

_MOST_STEPS = 16
"""Steps that are written out, at most."""

_ELEMENT = 50
"""Additions that take as long as loading one element.  (measured: docs/performance.md, `windows`)"""


def are_rows(blocked: Blocked) -> bool:
    """Return whether the rows of a product of 16-bit floats are, or are computed from, windows: their neighbours along
    the sum are next to each other in short runs.
    """
    rows, k = blocked.dots[0].args[0], blocked.sides(blocked.dots[0])[2].symbol
    return rows.dtype in HALVES and any(_is_window(load, k) for load in loads(rows))


def _is_window(load: Load, k: sympy.Symbol) -> bool:
    quotients = () if isinstance(load.index[0], Expr) else load.index[0].atoms(FloorDiv)
    return any(q.args[0] == k and q.args[1].is_Integer and q.args[1] <= _LONGEST_RUN for q in quotients)


def shapes(blocked: Blocked) -> tuple[tuple[int, ...], ...]:
    """Return the shapes for windows, if the rows are such; none where sums have a fixed order."""
    if blocked.invariant or not are_rows(blocked):
        return ()
    (columns,) = (max(32, power_of_two(extent(dim.size))) for dim in blocked.dims if dim.name == "n")
    return tuple(shape for shape in _SHAPES if shape[1] <= columns)


def written_out(blocked: Blocked, config: Config) -> Config:
    """Return `config` with the steps of windows written out, if they are few, and with a limit of registers."""
    length, device = blocked.sides(blocked.dots[0])[2].size, blocked.device
    if blocked.invariant or not length.is_Integer or not are_rows(blocked):
        return config
    if (steps := -(-int(length) // config.block("k"))) > _MOST_STEPS:
        return config
    registers = device.registers // (_TOGETHER * device.warp * config.num_warps) // 8 * 8
    limited = config.block("n") == _LIMITED and config.block("m") == device.warp * config.num_warps
    limited = limited and Feature.PTX in device.features
    return replace(config, unrolled=steps, registers=registers if limited else 0)


def loading(blocked: Blocked, config: Config) -> float:
    """Return the additions that take as long as loading both operands, element by element."""
    length = extent(blocked.sides(blocked.dots[0])[2].size)
    return _ELEMENT * programs(blocked, config) * (config.block("m") + config.block("n")) * length


__all__ = ["are_rows", "loading", "shapes", "written_out"]
