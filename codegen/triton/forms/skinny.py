"""Generates skinny GEMMs: contractions whose result has few columns, and as many rows as the larger operand.

As with fewer vectors (`matrix_vector.py`) all time is spent loading the matrix: the number of its bytes in flight
decides, and that few warps convert the same ones.  A block has all columns of the result.

A matrix whose elements hold several numbers (4-bit weights) has as many products, one for each.  No block reaches over
the end of a group of neighbours with one scale, so that the scale is applied to the product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import Self

from fusion.codegen.triton.blocks import Blocked, Config, Dim, extent, keeps_busy, power_of_two, programs
from fusion.codegen.triton.devices import speeds
from fusion.codegen.triton.forms import efficiency
from fusion.codegen.triton.forms.form import Form, Refused, Task
from fusion.codegen.triton.forms.traffic import matrix_itemsize
from fusion.codegen.triton.rewrites.vectors import NARROW_ROWS
from fusion.lowering.indexing import coefficient, split_points
from fusion.lowering.ir.expr import Expr, Load, index_of, loads, postorder
from fusion.lowering.ir.kernel import Role
from fusion.lowering.ir.scalar_ops import HALVES

# (rows of the matrix, bytes along each, warps, stages); fastest on an H200 first.  Where warps share rows (32 rows and
# 4 warps, each with 8 of the columns), each of them converts the matrix for itself.
_SHAPES = ((32, 256, 2, 4), (32, 256, 4, 5), (64, 256, 4, 4), (32, 256, 2, 3), (16, 256, 4, 6), (64, 128, 4, 5))
# For several numbers per element, and for those with scales for groups.
# Two warps: each reads the words of a few rows in the layout of the matrix units, unlike 64 rows on four warps.
_PACKED_SHAPES = ((64, 256, 2, 4), (64, 256, 2, 5), (64, 512, 2, 3), (32, 256, 1, 5), (32, 256, 2, 6))
_PACKED_GROUPS = ((32, 256, 2, 6), (64, 256, 2, 5), (64, 256, 2, 7), (32, 256, 1, 6))
# (columns of the matrix, rows of it, warps, stages), where it is contiguous along its columns, [k, n].
_ACROSS_BYTES = ((128, 64, 4, 4), (32, 256, 4, 3), (64, 64, 4, 5), (64, 32, 4, 6))
_ACROSS_HALVES = ((64, 128, 4, 4), (32, 128, 4, 5), (64, 64, 4, 5), (32, 256, 4, 3))
# (rows of the matrix, stages) of a program with a group of each line per warp; fastest on an H200 first.
_SHARED_SHAPES = ((32, 4), (32, 5), (32, 3), (16, 5), (64, 3))
_SHARED_LINES = ((32, 3), (64, 3), (32, 4), (16, 4))  # of two lines: with more in flight, fewer programs run at once

_LINE = 128  # bytes of a request for which memory is fastest: steps half as long or shorter are unrolled by two


@dataclass(frozen=True)
class Skinny(Form):
    """The plan for a product of 16-bit floats with few columns and many rows, summed in a loop."""

    name = "skinny product"

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept a loop over products of 16-bit floats, with few columns, and a matrix that is contiguous along either
        side.
        """
        blocked, dims = task.blocked, {dim.name: dim for dim in task.blocked.dims}
        if not blocked.contraction or blocked.chained:
            return Refused("it is no product, or folds products")
        if [name for name in dims if name not in ("b", "s")] != ["m", "k", "n"]:
            return Refused("its dimensions are not rows, columns and one sum")
        if dims["k"].role is not Role.LOOP or dims["n"].role is not Role.GRID:
            return Refused("its sum is no loop, or its columns are")
        if not extent(dims["n"].size) <= NARROW_ROWS < extent(dims["m"].size):
            return Refused("its columns are not few, or its rows not many")
        if not all(dot.args[0].dtype in HALVES for dot in blocked.dots):
            return Refused("it does not multiply halves")
        contiguous = any(_is_contiguous_along(blocked, dims["m"], dims[name]) for name in ("k", "m"))
        return cls(task) if "s" in dims or contiguous else Refused("its matrix is contiguous along neither side")

    def configs(self) -> tuple[Config, ...]:
        """Return the configurations of the table for the layout of the matrix."""
        blocked, dims = self.blocked, {dim.name: dim for dim in self.blocked.dims}
        if "s" in dims:
            return _by_lines(blocked, dims)
        return _along(blocked, dims) if _is_contiguous_along(blocked, dims["m"], dims["k"]) else _across(blocked, dims)

    def efficiency(self) -> float:
        """Return the share of the memory bandwidth, of which few programs cannot use all."""
        config, known = self.configs()[0], speeds(self.blocked.device).products
        full = known.narrow_together * self.blocked.device.multiprocessors
        occupied = min(1.0, math.sqrt(programs(self.blocked, config) / full))
        return efficiency.of_product(self.blocked, self.task.numerics, config, occupied)

    @property
    def exposes_epilogue(self) -> bool:
        """Return True: as in all products through pointers, epilogue time adds to GEMM time."""
        return True


def _along(blocked: Blocked, dims: Mapping[str, Dim]) -> tuple[Config, ...]:
    """Return configurations for a matrix that is contiguous along the summed axis, [n, k]."""
    size, along, columns = matrix_itemsize(blocked), extent(dims["k"].size), extent(dims["n"].size)
    group, matrices = _group(blocked, dims["k"]), _matrices(blocked, dims["m"])
    least = 8 if size == 1 else 16  # columns of a block: products with bytes can have 8
    shapes: Sequence[tuple[int, int, int, int]] = _SHAPES
    share = 1
    if len(blocked.dots) > 1:
        share, shapes = power_of_two(max(2, len(blocked.dots) // matrices)), _PACKED_SHAPES
        if group < _PACKED_SHAPES[0][1] // len(blocked.dots):  # for two matrices and few columns, the last is best
            shapes = _PACKED_GROUPS if columns > least or matrices == 1 else _PACKED_GROUPS[::-1]
    configs = []
    for m, bytes_along, warps, stages in shapes:
        k = max(16, min(bytes_along // size // share, power_of_two(along), group))
        blocks = (("m", m), ("k", k), ("n", max(least, power_of_two(columns))))
        config = Config(blocks, num_warps=warps, num_stages=stages)
        if matrices == 1 and 2 * k * size <= _LINE and 2 * k <= along:
            config = replace(config, num_stages=stages // 2 + 1, unrolled=2)
        configs.append(config)
    if len(blocked.dots) == 1 and programs(blocked, configs[0]) < 2 * blocked.device.multiprocessors:
        configs[:2] = configs[1::-1]  # alone on its multiprocessor, a program needs more warps and more bytes in flight
    return tuple(dict.fromkeys(configs))


def _across(blocked: Blocked, dims: Mapping[str, Dim]) -> tuple[Config, ...]:
    """Return configurations for a matrix contiguous along its columns; the first that keeps the device busy leads."""
    columns, along = extent(dims["n"].size), power_of_two(extent(dims["k"].size))
    group = _group(blocked, dims["k"])
    configs = []
    for m, rows, warps, stages in _ACROSS_BYTES if matrix_itemsize(blocked) == 1 else _ACROSS_HALVES:
        k = max(16, min(rows // power_of_two(len(blocked.dots)), along, group))
        blocks = (("m", m), ("k", k), ("n", max(16, power_of_two(columns))))
        configs.append(Config(blocks, num_warps=warps, num_stages=stages))
    return tuple(dict.fromkeys(sorted(configs, key=lambda config: not keeps_busy(blocked, config))))


def _by_lines(blocked: Blocked, dims: Mapping[str, Dim]) -> tuple[Config, ...]:
    """Return configurations of a product with a group per warp."""
    shares, columns = extent(dims["s"].size), max(8, power_of_two(extent(dims["n"].size)))
    group = _group(blocked, dims["k"])
    configs = []
    for m, stages in _SHARED_LINES if shares * group > _LINE else _SHARED_SHAPES:
        blocks = (("s", shares), ("m", m), ("k", group), ("n", columns))
        configs.append(Config(blocks, num_warps=shares, num_stages=stages))
    return tuple(configs)


# Loads ----------------------------------------------------------------------------------------------------------------


def _loads(blocked: Blocked) -> Iterable[Load]:
    """Yield the loads of the products."""
    return (load for dot in blocked.dots for load in loads(*dot.args))


def _varies(load: Load, rows: Dim) -> bool:
    """Return whether the offset of a load is known and differs from row to row."""
    return not isinstance(load.index[0], Expr) and rows.symbol in load.index[0].free_symbols


def _is_contiguous_along(blocked: Blocked, rows: Dim, along: Dim) -> bool:
    """Return whether the matrix is contiguous along `along`."""
    offsets = [load.index[0] for load in _loads(blocked) if _varies(load, rows)]
    return any(coefficient(offset, along.symbol) == 1 for offset in offsets if not isinstance(offset, Expr))


def _matrices(blocked: Blocked, rows: Dim) -> int:
    """Return the number of matrices: fewer than there are products where an element holds several numbers."""
    size = matrix_itemsize(blocked)
    return max(1, len({load.buffer for load in _loads(blocked) if load.dtype.itemsize == size and _varies(load, rows)}))


def _group(blocked: Blocked, dim: Dim) -> int:
    """Return the number of neighbours along `dim` for which every value per group, such as a scale, is the same."""
    nodes = postorder(*(arg for dot in blocked.dots for arg in dot.args))
    indices = [index for node in nodes for index in index_of(node)]
    points = [point for point in split_points(indices, dim.symbol, dim.size) if point >= 16]
    return points[0] & -points[0] if points else 1 << 30
