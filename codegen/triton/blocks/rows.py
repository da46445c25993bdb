"""The dimensions of pointwise kernels and of reductions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from codegen.triton.blocks.contiguous import at_least, by_stride, contiguous_along, load_offsets, store_offsets
from codegen.triton.blocks.dims import Dim
from lowering.expr import TileRef, postorder
from lowering.indexing import ZERO, coefficient
from lowering.kernel import Fold, Kernel, KernelAxis, Loop, Prefix, Role, statements

HELD_COLUMN, HELD_ONCE = 1024, 128
"""The longest column that is held whole, where it is needed again and where it is read once: times 16 columns it fills
the registers of 16 warps, and a walk keeps wider rows of memory in flight."""


_NAMES = ("r", "q", "u", "v", "w", "p", "o", "h")  # of reduced dimensions beyond those that have a name of their own


def row_dims(kernel: Kernel) -> tuple[Dim, ...]:
    """(x), (y, x), or x and the reduced dimensions of a kernel without contractions, in tile order."""
    grid = by_stride([axis for axis in kernel.with_role(Role.GRID) if axis.size != 1], kernel)
    reduced = reduced_dims(kernel, ())
    if reduced:
        x = (Dim("x", grid, Role.GRID),) if grid else ()
        along_x = x and contiguous_along(kernel, x[0]) > max(contiguous_along(kernel, dim) for dim in reduced)
        if x and len(reduced) == 2 and _continues(kernel, *reduced):
            return (reduced[0], *x, reduced[1])
        return (*reduced, *x) if along_x else (*x, *reduced)
    crossing = _crossing_axis(kernel, grid)
    if crossing is not None:
        others = tuple(axis for axis in grid[:-1] if axis is not crossing)
        return Dim("y", (*others, crossing), Role.GRID), Dim("x", grid[-1:], Role.GRID)
    return (Dim("x", grid, Role.GRID),) if grid else ()


def _continues(kernel: Kernel, outer: Dim, inner: Dim) -> bool:
    """Are the points of `outer` words of a row side by side, of which a block of `inner` is one?

    Then they come before the rows: Triton gives neighbouring words to neighbouring threads in the order of dimensions,
    and all rows of a block meet the same words of a vector in one thread.
    """
    if outer.role is not Role.LOOP or inner.role is not Role.WHOLE or len(outer.axes) != 1 or len(inner.axes) != 1:
        return False
    (walked,), (held,) = outer.axes, inner.axes
    offsets = [offset for offset in load_offsets(kernel) if held.symbol in offset.free_symbols]
    strides = [(coefficient(offset, walked.symbol), coefficient(offset, held.symbol)) for offset in offsets]
    return bool(strides) and all(long == short * held.size for long, short in strides if short and long is not None)


def too_tall(kernel: Kernel, dims: Sequence[Dim]) -> bool:
    """Would a block of neighbouring columns, each held whole, not fit the registers of a program, or for nothing?"""
    if len(dims) != 2 or dims[1].name != "x" or dims[0].role is not Role.WHOLE:
        return False
    folds = [stmt for stmt in kernel.body if isinstance(stmt, Fold)]
    again = any(isinstance(node, TileRef) for node in postorder(*(arg for fold in folds for arg in fold.args)))
    reduced = {axis.symbol for axis in dims[0].axes}
    again |= any(reduced & offset.free_symbols for offset in store_offsets(kernel))
    return not dims[0].size.is_Integer or int(dims[0].size) > (HELD_COLUMN if again else HELD_ONCE)


def reduced_dims(
    kernel: Kernel, named: Sequence[tuple[frozenset[sympy.Symbol], str]], needed: frozenset[sympy.Symbol] = frozenset()
) -> tuple[Dim, ...]:
    """One dimension per set of reduced axes that every fold and loop takes together.

    Axes of size 1 are left out unless they are `needed`.
    """
    groups: dict[tuple[object, ...], list[KernelAxis]] = {}
    for axis in kernel.axes:
        if axis.role is not Role.GRID and (axis.size != 1 or axis.symbol in needed):
            groups.setdefault((axis.role, *_memberships(kernel, axis.symbol)), []).append(axis)
    spare = iter(_NAMES)
    dims = []
    for axes in groups.values():
        symbols = frozenset(axis.symbol for axis in axes)
        name = next((name for over, name in named if symbols <= over), None)
        named = [entry for entry in named if entry[1] != name]
        dims.append(Dim(name or next(spare), by_stride(axes, kernel), axes[0].role))
    return tuple(dims)


def _memberships(kernel: Kernel, symbol: sympy.Symbol) -> Iterator[bool]:
    for stmt in statements(kernel.body):
        if isinstance(stmt, Fold):
            yield from (symbol in stmt.over, symbol in stmt.rows, symbol in stmt.columns)
        elif isinstance(stmt, Prefix):
            yield symbol == stmt.along
        elif isinstance(stmt, Loop):
            yield symbol in stmt.axes


def _crossing_axis(kernel: Kernel, grid: Sequence[KernelAxis]) -> KernelAxis | None:
    """The axis along which some load is contiguous while the store is contiguous along the last one."""
    stored = next((o for o in store_offsets(kernel) if grid and coefficient(o, grid[-1].symbol) == 1), None)
    if stored is None or not at_least(grid[-1].size, 8):
        return None
    for load in load_offsets(kernel):
        along = [axis for axis in grid[:-1] if coefficient(load, axis.symbol) == 1 and at_least(axis.size, 8)]
        if along and coefficient(load, grid[-1].symbol) != ZERO:
            return along[-1]
    return None
