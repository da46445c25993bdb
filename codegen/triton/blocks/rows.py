"""Maps the axes of pointwise kernels and of reductions to block dimensions."""

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
from fusion.lowering.indexing import ZERO, coefficient
from fusion.lowering.ir.expr import Expr, TileRef, postorder
from fusion.lowering.ir.kernel import Fold, Kernel, KernelAxis, Loop, Prefix, Role, Stmt, Store, statements, values_of

HELD_COLUMN, HELD_FOLDED, HELD_ONCE = 1024, 32, 128
"""The longest column that is held whole: where it is needed again for a store, where only folds need it again, and
where it is read once.  Times 16 columns it fills the registers of 16 warps, and a loop keeps wider rows of memory in
flight.  (measured: docs/performance.md, `HELD_COLUMN`)
"""


_LEAST_ROW, _UNKNOWN_ROW = 64, 1024
"""The fewest columns that are worth a block, and the columns assumed for a row whose length is not known."""

_LEAST_SIDE = 8
"""The fewest elements of either side of a tile that reads along one axis and stores along another."""

_NAMES = ("r", "q", "u", "v", "w", "p", "o", "h")  # of reduced dimensions that have no name of their own


def row_dims(kernel: Kernel, *, reorders: bool = True) -> tuple[Dim, ...]:
    """Return the dimensions of a kernel without contractions, in tile order.

    A map has (x), (y, x) or (b, x); a kernel with folds or scans has x, or b and x, and the reduced dimensions.
    Without `reorders` reduced axes stay in their order, whatever is contiguous.
    """
    grid = by_stride([axis for axis in kernel.with_role(Role.GRID) if axis.size != 1], kernel)
    reduced = reduced_dims(kernel, (), reorders=reorders)
    if reduced:
        x = (Dim("x", grid, Role.GRID),) if grid else ()
        along_x = x and (is_crossed(kernel, x[0], reduced) or _is_along(kernel, x[0], reduced))
        if x and len(reduced) == 2 and _is_word_order(kernel, *reduced):
            return (reduced[0], *x, reduced[1])
        if along_x and _by_columns(kernel, grid):
            return (Dim("b", grid[:-1], Role.GRID), *reduced, Dim("x", grid[-1:], Role.GRID))
        return (*reduced, *x) if along_x else (*x, *reduced)
    crossing = _crossing_axis(kernel, grid)
    if crossing is not None:
        row = _row_behind(grid, crossing)
        others = tuple(axis for axis in grid[: -len(row)] if axis is not crossing)
        return Dim("y", (*others, crossing), Role.GRID), Dim("x", row, Role.GRID)
    if _by_rows(kernel, grid):
        return Dim("b", grid[:-1], Role.GRID), Dim("x", grid[-1:], Role.GRID)
    return (Dim("x", grid, Role.GRID),) if grid else ()


def _is_along(kernel: Kernel, x: Dim, reduced: Sequence[Dim]) -> bool:
    """Return whether more bytes are read along the dimension of the rows than along any reduced one."""
    return contiguous_along(kernel, x) > max(contiguous_along(kernel, dim) for dim in reduced)


def row_block(size: sympy.Expr, most: int) -> int:
    """Return the number of columns of a row per block, at most `most`, so that blocks fit the row; 0 if none do.

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
    """Return whether elements are better processed by rows and columns than as one linear index.

    With one linear index each element divides by the length of a row to load a value of its row.  A block of one row
    knows its row, and loads the value once, but a row that does not start at an aligned address is read and written
    element by element (measured: docs/performance.md, `rows`).
    """
    if len(grid) < 2 or not row_block(grid[-1].size, _LEAST_ROW):
        return False
    last, outer = grid[-1].symbol, {axis.symbol for axis in grid[:-1]}
    stores = [(store.param, store.offset) for store in statements(kernel.body, Store)]
    stored = [(name, offset) for name, offset in stores if not isinstance(offset, Expr)]
    if len(stored) < len(stores) or any(coefficient(offset, last) != 1 for _, offset in stored):
        return False
    if not grid[-1].size.is_Integer:
        return True  # dividing by a 64-bit number costs more than everything else
    streams = [(name, offset) for name, offset in direct_loads(kernel) if coefficient(offset, last) == 1] + stored
    odd = sum(not starts_at_words(kernel, name, offset, outer) for name, offset in streams)
    return len(row_values(kernel, grid)) > odd


def _by_columns(kernel: Kernel, grid: Sequence[KernelAxis]) -> bool:
    """Return whether folded columns are better kept separate from the outer axes, as the rows of a batch are.

    In one linear index each column would divide to find its outer axes, and the values of a row would be loaded, and
    checked, for each of its columns.
    """
    return len(grid) > 1 and row_block(grid[-1].size, _LEAST_ROW) > 0 and bool(row_values(kernel, grid))


def row_values(kernel: Kernel, grid: Sequence[KernelAxis]) -> list[sympy.Expr]:
    """Return the offsets of values that are loaded once per row, for all points of the last axis."""
    last, outer = grid[-1].symbol, {axis.symbol for axis in grid[:-1]}
    offsets = load_offsets(kernel)
    return [offset for offset in offsets if outer & offset.free_symbols and last not in offset.free_symbols]


def starts_at_words(
    kernel: Kernel, name: str, offset: sympy.Expr, outer: Collection[sympy.Symbol], word: int = WORD
) -> bool:
    """Return whether every row of a tensor, one for each point of `outer`, is known to start at a whole word.

    Args:
        word: bytes.
    """
    size = kernel.param(name).dtype.itemsize
    strides = (coefficient(offset, symbol) for symbol in outer)
    return all(stride is not None and (stride * size / word).is_integer is not False for stride in strides)


def _is_word_order(kernel: Kernel, outer: Dim, inner: Dim) -> bool:
    """Return whether the points of `outer` are consecutive words of a row, each of which is a block of `inner`.

    Then `outer` comes before the rows: Triton distributes neighbouring words over neighbouring threads in the order of
    dimensions, and all rows of a block use the same words of a vector in one thread.
    """
    if outer.role is not Role.LOOP or inner.role is not Role.WHOLE or len(outer.axes) != 1 or len(inner.axes) != 1:
        return False
    (outer_axis,), (inner_axis,) = outer.axes, inner.axes
    offsets = [offset for offset in load_offsets(kernel) if inner_axis.symbol in offset.free_symbols]
    strides = [(coefficient(offset, outer_axis.symbol), coefficient(offset, inner_axis.symbol)) for offset in offsets]
    return bool(strides) and all(
        long == short * inner_axis.size for long, short in strides if short and long is not None
    )


def too_tall(kernel: Kernel, dims: Sequence[Dim]) -> bool:
    """Return whether blocks of neighbouring columns, held in full, would exceed the registers of a program, or occupy
    them without need.
    """
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
    """Return whether a value is stored for each point of `axes`."""
    if not isinstance(stmt, Store) or isinstance(stmt.offset, Expr):
        return False
    return not stmt.offset.free_symbols.isdisjoint(axes)


def reduced_dims(
    kernel: Kernel,
    named: Sequence[tuple[frozenset[sympy.Symbol], str]],
    needed: frozenset[sympy.Symbol] = frozenset(),
    *,
    reorders: bool = True,
) -> tuple[Dim, ...]:
    """Return one dimension for each set of reduced axes that appear together in every fold and loop.

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
        ordered = by_stride(axes, kernel) if reorders else tuple(axes)
        dims.append(Dim(name or next(spare), ordered, axes[0].role))
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


def _crossing_axis(kernel: Kernel, grid: tuple[KernelAxis, ...]) -> KernelAxis | None:
    """Return the axis along which some load is contiguous while the store is contiguous along the ones behind it."""
    stored = next((o for o in store_offsets(kernel) if grid and coefficient(o, grid[-1].symbol) == 1), None)
    if stored is None:
        return None
    for load in load_offsets(kernel):
        along = [axis for axis in grid[:-1] if coefficient(load, axis.symbol) == 1 and at_least(axis.size, _LEAST_SIDE)]
        if along and coefficient(load, grid[-1].symbol) != ZERO:
            row = sympy.Mul(*(axis.size for axis in _row_behind(grid, along[-1])))
            return along[-1] if at_least(row, _LEAST_SIDE) else None
    return None


def _row_behind(grid: tuple[KernelAxis, ...], crossing: KernelAxis) -> tuple[KernelAxis, ...]:
    """Return the last axis, or all that come after `crossing` where the last one is short: the rows of small images."""
    return grid[-1:] if at_least(grid[-1].size, _LEAST_SIDE) else grid[grid.index(crossing) + 1 :]
