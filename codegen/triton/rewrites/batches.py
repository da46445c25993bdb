"""Splits the rows or columns of a product that step through several matrices into matrix and row.

    x[m // 768, k, m % 768] of m: 49152   →   x[b, k, m] of b: 64, m: 768

A linear layer over a transposed tensor multiplies all of its matrices at once, as the rows of one matrix that is not
contiguous in memory.  Split, each is a matrix that a tensor descriptor can describe; the weight is the same for all.

Input: a Kernel with contractions; output: the same kernel with one more axis, or the same object where operands are one
matrix already, where splitting does not make them matrices, and where the matrices are too small to fill blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import sympy

from fusion.lowering.indexing import ZERO, coefficient, over_symbol, simplify, split_points, substitute_all
from fusion.lowering.ir.expr import Expr, Index, index_of, loads, postorder
from fusion.lowering.ir.kernel import (
    Fold,
    Kernel,
    KernelAxis,
    Role,
    Stmt,
    Store,
    map_statements,
    statements,
    values_of,
    with_values,
)

SMALLEST_SIDE = 128
"""The fewest rows or columns of a matrix of a batch."""
STRIDE_MULTIPLE = 16
"""Bytes of which the strides of rows and of matrices have to be multiples."""


def batch_axes(kernel: Kernel, dots: Sequence[Fold], side: Sequence[KernelAxis]) -> frozenset[sympy.Symbol]:
    """Return the axes of one side (outermost first) that step from matrix to matrix: all but the last, or none."""
    if len(side) < 2 or not _long(side[-1]):
        return frozenset()
    operands = [(load.index[0], load.dtype.itemsize) for dot in dots for load in loads(*dot.args)]
    if not all(_is_matrix(kernel, *each) for each in operands):
        return frozenset()
    gained = any(
        not _is_one_axis(index, side) and _is_matrix(kernel, index, size)
        for index, size in (*operands, *_tiles(kernel, dots))
    )
    return frozenset(axis.symbol for axis in side[:-1]) if gained else frozenset()


def batched(kernel: Kernel, dots: Sequence[Fold]) -> Kernel:
    """Return `kernel` with rows and columns of its only contraction split where their matrices end."""
    if len(dots) != 1 or kernel.then is not None:
        return kernel
    for axis in kernel.with_role(Role.GRID):
        if axis.symbol in (*dots[0].rows, *dots[0].columns):
            kernel = _split(kernel, axis)
    return kernel


def substitute_axes(
    body: Sequence[Stmt], indices: Mapping[sympy.Symbol, sympy.Expr], sizes: Mapping[sympy.Symbol, sympy.Expr]
) -> tuple[Stmt, ...]:
    """Return `body` with axes replaced in all values and offsets, at once, because expressions share parts.

    The axes that a statement folds or loops over are left as they are.
    """
    roots = [value for stmt in statements(body) for value in values_of(stmt)]
    substituted = dict(zip(roots, substitute_all(roots, indices, sizes), strict=True))

    def rewritten(stmt: Stmt) -> Stmt:
        stmt = with_values(stmt, [substituted[value] for value in values_of(stmt)])
        if not isinstance(stmt, Store) or isinstance(stmt.offset, Expr):
            return stmt
        return replace(stmt, offset=simplify(stmt.offset.xreplace(dict(indices)), sizes))

    return map_statements(body, rewritten)


def _split(kernel: Kernel, axis: KernelAxis) -> Kernel:
    """Return `kernel` with one axis split, if its operands are matrices then."""
    points = split_points(list(_indices(kernel)), axis.symbol, axis.size)
    if len(points) != 1:
        return kernel
    length = sympy.Integer(points[0])
    outer = KernelAxis(_unused(kernel), axis.size / length, Role.GRID)
    inner = replace(axis, size=length)
    axes = tuple(part for other in kernel.axes for part in ((outer, inner) if other is axis else (other,)))
    index = {axis.symbol: outer.symbol * length + axis.symbol}
    sizes = {each.symbol: each.size for each in axes}

    def sides(symbols: tuple[sympy.Symbol, ...]) -> tuple[sympy.Symbol, ...]:
        return tuple(s for symbol in symbols for s in ((outer.symbol, symbol) if symbol == axis.symbol else (symbol,)))

    def with_sides(stmt: Stmt) -> Stmt:
        return replace(stmt, rows=sides(stmt.rows), columns=sides(stmt.columns)) if isinstance(stmt, Fold) else stmt

    changed = replace(kernel, axes=axes, body=map_statements(substitute_axes(kernel.body, index, sizes), with_sides))
    dots = [stmt for stmt in statements(changed.body, Fold) if stmt.op == "dot"]
    return changed if batch_axes(changed, dots, (outer, inner)) else kernel


def _indices(kernel: Kernel) -> Iterator[sympy.Expr]:
    """Yield the indices of all loads and stores."""
    for stmt in statements(kernel.body):
        for node in postorder(*values_of(stmt)):
            yield from index_of(node)
        if isinstance(stmt, Store) and not isinstance(stmt.offset, Expr):
            yield stmt.offset


def _unused(kernel: Kernel) -> sympy.Symbol:
    used = {axis.symbol for axis in kernel.axes}
    return next(symbol for number in range(len(used) + 1) if (symbol := over_symbol(number)) not in used)


def _long(axis: KernelAxis) -> bool:
    return bool(axis.size.is_Integer and axis.size >= SMALLEST_SIDE)


def _tiles(kernel: Kernel, dots: Sequence[Fold]) -> Iterator[tuple[Index, int]]:
    """Yield the index of each load and store that spans rows and columns, and the bytes of an element."""
    for stmt in kernel.body:
        if isinstance(stmt, Store):
            accesses = [(stmt.offset, kernel.param(stmt.param).dtype.itemsize)]
            accesses += [(load.index[0], load.dtype.itemsize) for load in loads(*values_of(stmt))]
            for index, size in accesses:
                if not isinstance(index, Expr) and all(
                    index.free_symbols.intersection(side) for dot in dots for side in (dot.rows, dot.columns)
                ):
                    yield index, size


def _is_one_axis(index: Index, side: Sequence[KernelAxis]) -> bool:
    """Return whether an index has the strides of one merged axis along these axes."""
    step = ZERO
    for axis in reversed(side):
        slope = None if isinstance(index, Expr) else coefficient(index, axis.symbol)
        if slope is None or (axis is not side[-1] and sympy.expand(slope - step) != 0):
            return False
        step = slope * axis.size
    return True


def _is_matrix(kernel: Kernel, index: Index, size: int) -> bool:
    """Return whether all rows of all matrices, of elements of `size` bytes, start at multiples of STRIDE_MULTIPLE."""
    for axis in kernel.axes:
        step = None if isinstance(index, Expr) else coefficient(index, axis.symbol)
        if step is None or not step.is_Integer or (step not in (0, 1) and int(step) * size % STRIDE_MULTIPLE):
            return False
    return True
