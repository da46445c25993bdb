"""The dimensions of pointwise kernels and of reductions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import sympy
from typing_extensions import assert_never

from fusion.codegen.triton.blocks.contiguous import (
    at_least,
    by_stride,
    contiguous_along,
    direct_loads,
    is_crossed,
    load_offsets,
    store_offsets,
)
from fusion.codegen.triton.blocks.dims import WORD, Dim
from fusion.lowering.expr import Expr, TileRef, postorder
from fusion.lowering.indexing import ZERO, coefficient
from fusion.lowering.kernel import Fold, Kernel, KernelAxis, Loop, Prefix, Role, Stmt, Store, statements, values_of

HELD_COLUMN, HELD_FOLDED, HELD_ONCE = 1024, 32, 128
"""The longest column that is held whole, where it is needed again to be stored, where only folds need it again, and
where it is read once: times 16 columns it fills the registers of 16 warps, and a walk keeps wider rows of memory in
flight.  (H200, mean and variance of bf16, 103 MB in columns of 448: 93 us held, where a sum of a walk takes 30.)"""


_LEAST_ROW, _UNKNOWN_ROW = 64, 1024
"""The fewest columns that are worth a block, and how many of a row whose length is not known."""

_NAMES = ("r", "q", "u", "v", "w", "p", "o", "h")  # of reduced dimensions beyond those that have a name of their own


def row_dims(kernel: Kernel) -> tuple[Dim, ...]:
    """The dimensions of a kernel without contractions, in tile order.

    (x), (y, x) or (b, x) of a map; x, or b and x, and the reduced dimensions of what folds or scans.
    """
    grid = by_stride([axis for axis in kernel.with_role(Role.GRID) if axis.size != 1], kernel)
    reduced = reduced_dims(kernel, ())
    if reduced:
        x = (Dim("x", grid, Role.GRID),) if grid else ()
        along_x = x and (is_crossed(kernel, x[0], reduced) or _is_along(kernel, x[0], reduced))
        if x and len(reduced) == 2 and _continues(kernel, *reduced):
            return (reduced[0], *x, reduced[1])
        if along_x and _by_columns(kernel, grid):
            return (Dim("b", grid[:-1], Role.GRID), *reduced, Dim("x", grid[-1:], Role.GRID))
        return (*reduced, *x) if along_x else (*x, *reduced)
    crossing = _crossing_axis(kernel, grid)
    if crossing is not None:
        others = tuple(axis for axis in grid[:-1] if axis is not crossing)
        return Dim("y", (*others, crossing), Role.GRID), Dim("x", grid[-1:], Role.GRID)
    if _by_rows(kernel, grid):
        return Dim("b", grid[:-1], Role.GRID), Dim("x", grid[-1:], Role.GRID)
    return (Dim("x", grid, Role.GRID),) if grid else ()


def _is_along(kernel: Kernel, x: Dim, reduced: Sequence[Dim]) -> bool:
    """Are more loads contiguous along the rows' own dimension than along any of those that are reduced?"""
    return contiguous_along(kernel, x) > max(contiguous_along(kernel, dim) for dim in reduced)


def row_block(size: sympy.Expr, most: int) -> int:
    """How many columns of a row to take at a time, at most `most`, so that blocks fit its length; 0 if none do.

    >>> row_block(sympy.Integer(50257), 2048), row_block(sympy.Integer(768), 2048), row_block(sympy.Integer(49), 2048)
    (2048, 256, 0)
    """
    if not size.is_Integer:
        return min(most, _UNKNOWN_ROW)
    length, block = int(size), most
    while block >= _LEAST_ROW and -(-length // block) * block * 8 > length * 9:
        block //= 2
    return block if block >= _LEAST_ROW else 0


def _by_rows(kernel: Kernel, grid: Sequence[KernelAxis]) -> bool:
    """Are elements better taken by rows and columns than one after the other, all in one line?

    In a line each element divides by the length of a row where it reads what belongs to the row.  In a block of one row
    that is known, and so is what is read there, but a row that does not start at an aligned address is read and written
    element by element.  (H200, the gradient of 8192 × 50257 logits in bfloat16, with four numbers per row: 669 µs in a
    line, 493 by rows; of 50264 words 407 by rows, where a copy takes 383.)
    """
    if len(grid) < 2 or not row_block(grid[-1].size, _LEAST_ROW):
        return False
    last, outer = grid[-1].symbol, {axis.symbol for axis in grid[:-1]}
    stores = list(statements(kernel.body, Store))
    if any(isinstance(store.offset, Expr) or coefficient(store.offset, last) != 1 for store in stores):
        return False
    if not grid[-1].size.is_Integer:
        return True  # to divide by a number of 64 bits costs more than all else
    streams = [*direct_loads(kernel), *((store.param, store.offset) for store in stores)]
    streams = [(name, offset) for name, offset in streams if coefficient(offset, last) == 1]
    odd = sum(not _aligned(kernel, name, offset, outer) for name, offset in streams)
    return len(row_values(kernel, grid)) > odd


def _by_columns(kernel: Kernel, grid: Sequence[KernelAxis]) -> bool:
    """Are columns that are folded better taken apart from what they are columns of, as the rows of a batch are?

    In one line with it each column would divide to find where it belongs, and what belongs to a row would be read,
    and checked, for each of its columns.
    """
    return len(grid) > 1 and row_block(grid[-1].size, _LEAST_ROW) > 0 and bool(row_values(kernel, grid))


def row_values(kernel: Kernel, grid: Sequence[KernelAxis]) -> list[sympy.Expr]:
    """The offsets of what is read for each row, once for all points of the last axis."""
    last, outer = grid[-1].symbol, {axis.symbol for axis in grid[:-1]}
    offsets = load_offsets(kernel)
    return [offset for offset in offsets if outer & offset.free_symbols and last not in offset.free_symbols]


def _aligned(kernel: Kernel, name: str, offset: sympy.Expr, outer: Collection[sympy.Symbol]) -> bool:
    """Does every row of a tensor start at a multiple of 16 bytes, as far as is known?"""
    size = kernel.param(name).dtype.itemsize
    strides = (coefficient(offset, symbol) for symbol in outer)
    return all(stride is not None and (stride * size / WORD).is_integer is not False for stride in strides)


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
    reduced = [dim for dim in dims if dim.role is not Role.GRID]
    if len(reduced) != 1 or dims[-1].name != "x" or reduced[0].role is not Role.WHOLE:
        return False
    (held,) = reduced
    axes = {axis.symbol for axis in held.axes}
    folded, stored = (
        any(isinstance(node, TileRef) for stmt in stmts for node in postorder(*values_of(stmt)))
        for stmts in (
            [stmt for stmt in kernel.body if isinstance(stmt, Fold)],
            [stmt for stmt in kernel.body if _stores_along(stmt, axes)],
        )
    )
    longest = HELD_COLUMN if stored else HELD_FOLDED if folded else HELD_ONCE
    return not held.size.is_Integer or int(held.size) > longest


def _stores_along(stmt: Stmt, axes: Collection[sympy.Symbol]) -> bool:
    """Is something stored for each point of `axes`?"""
    return isinstance(stmt, Store) and not isinstance(stmt.offset, Expr) and bool(stmt.offset.free_symbols & axes)


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
        match stmt:
            case Fold():
                yield from (symbol in stmt.over, symbol in stmt.rows, symbol in stmt.columns)
            case Prefix():
                yield symbol == stmt.along
            case Loop():
                yield symbol in stmt.axes
            case Store():
                pass
            case _:
                assert_never(stmt)


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
