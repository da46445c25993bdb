"""Finds the axes along which loads and stores are contiguous in memory, from their offsets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import sympy

from fusion.codegen.triton.blocks.config import extent
from fusion.codegen.triton.blocks.dims import Dim
from fusion.lowering.indexing import RUN, ZERO, coefficient, direct_part, within_run
from fusion.lowering.ir.expr import Expr, Index, Load, free_axes, postorder
from fusion.lowering.ir.kernel import Kernel, KernelAxis, Role, Store, statements, values_of

DECIDING_RATIO = 4
"""Loads of at least a quarter of the bytes of the largest one decide which dimension is contiguous."""


def load_offsets(kernel: Kernel) -> list[sympy.Expr]:
    """Return the offsets of all direct loads."""
    return [offset for _, offset in direct_loads(kernel)]


def direct_loads(kernel: Kernel) -> list[tuple[str, sympy.Expr]]:
    """Return (parameter, offset) of all direct loads: those whose offset is not data."""
    every = [(load.buffer, load.index[0]) for load in _all_loads(kernel)]
    return [(buffer, offset) for buffer, offset in every if not isinstance(offset, Expr)]


def _all_loads(kernel: Kernel) -> list[Load]:
    roots = [value for stmt in statements(kernel.body) for value in values_of(stmt)]
    return [node for node in postorder(*roots) if isinstance(node, Load)]


def store_offsets(kernel: Kernel) -> list[sympy.Expr]:
    """Return the offsets of all direct stores."""
    stores = [stmt.offset for stmt in statements(kernel.body, Store)]
    return [offset for offset in stores if not isinstance(offset, Expr)]


def contiguous_along(kernel: Kernel, dim: Dim) -> int:
    """Return the bytes of the largest loads that are contiguous along the last axis of `dim`.

    A gathered row counts by the elements read, which may be more than its indices: a sum of rows of 512 numbers is
    contiguous along their columns, whichever way the indices of the rows are read.
    """
    last = dim.axes[-1].symbol
    loads = [(_bytes_read(load, kernel), load.index[0]) for load in _all_loads(kernel)]
    most = max((count for count, _ in loads), default=0)
    return sum(count for count, offset in loads if count * DECIDING_RATIO >= most and _steps_by_one(offset, last))


def _bytes_read(load: Load, kernel: Kernel) -> int:
    """Return the bytes of the points at which a load happens: once, where programs read the same points again.

    Where it varies along rows as well as along the reduced axes, the rows of each outer axis take sectors of their own,
    however small the tensor is.  (H200: see `forms.rows`, where one operand is a table of 256 × 256 for 192 heads.)
    """
    free = free_axes(load)
    grid = kernel.with_role(Role.GRID)
    reduced = any(axis.symbol in free for axis in kernel.axes if axis.role is not Role.GRID)
    inner = max((n for n, axis in enumerate(grid) if axis.symbol in free), default=0) if reduced else 0
    outer = {axis.symbol for axis in grid[:inner]}
    return load.dtype.itemsize * math.prod(extent(axis.size) for axis in kernel.axes if axis.symbol in free | outer)


def _steps_by_one(offset: Index, axis: sympy.Symbol) -> bool:
    """Return whether the next element along `axis` is the next one in memory."""
    direct, others = direct_part(offset)
    return axis not in others and coefficient(within_run(direct, axis), axis) == 1


def is_crossed(kernel: Kernel, x: Dim, reduced: Sequence[Dim]) -> bool:
    """Return whether some of the largest tensors are read or stored contiguously along `x`, and others are read
    contiguously along the reduced axis.

    A block of several rows reads full sectors of both; with one row per block, each element of the former would be a
    sector.
    """
    if len(reduced) != 1 or not (at_least(x.axes[-1].size, RUN) and at_least(reduced[0].axes[-1].size, RUN)):
        return False
    last, across = x.axes[-1].symbol, reduced[0].axes[-1].symbol
    stores = [offset for offset in store_offsets(kernel) if across in offset.free_symbols]
    stored = any(coefficient(within_run(offset, last), last) == 1 for offset in stores)
    return (stored or contiguous_along(kernel, x) > 0) and contiguous_along(kernel, reduced[0]) > 0


def by_stride(axes: Sequence[KernelAxis], kernel: Kernel) -> tuple[KernelAxis, ...]:
    """Return axes by falling stride in the first access that has a known stride for each; else as they are."""
    reduced = bool(axes) and axes[0].role is not Role.GRID
    accesses = load_offsets(kernel) if reduced else store_offsets(kernel)
    for offset in accesses:
        strides = {axis: coefficient(offset, axis.symbol) or ZERO for axis in axes}
        if all(stride.is_Integer and stride != 0 for stride in strides.values()):
            return tuple(sorted(axes, key=lambda axis: -abs(int(strides[axis]))))
    return tuple(axes)


def at_least(size: sympy.Expr, least: int) -> bool:
    """Return whether the size may be at least `least`; true of an unknown size."""
    return not size.is_Integer or int(size) >= least
