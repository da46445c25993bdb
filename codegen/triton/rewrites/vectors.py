"""Rewrites a contraction with a few rows (GEMV) as multiplications and a sum.

Input: a Kernel with one `dot`, one side of which has at most `ROWS_PER_THREAD` rows, or with several that have the same
few rows; output: a Kernel with one `sum` for each of them and each such row, of products over the same axes, so that a
tile of the other operand is loaded once for all of its rows.  Such a product is bound by the memory traffic of the
larger operand: the matrix units would pad the few rows to 16, and their pipeline keeps less of that traffic in flight
than plain loads of 16 bytes do.

    dot over r0 of x[r0], w[4096*i1 + r0]    rows i0: 1    →    sum over r0 of f32(x[r0]) * f32(w[4096*i1 + r0])

The larger operand is contiguous along the summed axis, [n, k].  Where it is contiguous along its own rows, [k, n], the
pipeline of the matrix units is faster (`forms/skinny.py`), except for a single row and weights that are bytes: these
become sums too, of which neighbouring threads take neighbouring columns.  With several rows, 16-bit floats times bytes
are left to the matrix units, which leave time to convert.  So is a single row where each byte is several numbers of a
matrix with enough rows, unless there are several such matrices with scales for groups (measured: docs/performance.md,
`vectors`).  Unchanged as well: an operand that is contiguous along neither, and a kernel with other folds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from fusion.codegen.triton.devices import Device
from fusion.codegen.triton.rewrites.packed import MOST_PACKED
from fusion.lowering.indexing import FloorDiv, coefficient, simplify, split_points, substitute_all
from fusion.lowering.ir.expr import Cast, Expr, Op, TileRef, index_of, loads, make_cast, postorder, rewrite
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Role, Stmt, Store, map_statements, statements
from fusion.lowering.ir.scalar_ops import HALVES

ROWS_PER_THREAD = 4
"""The most rows for which every thread holds a sum of its own."""

FILLED = 64
"""Rows of a matrix per multiprocessor that give each of them a block of the matrix units."""

NARROW_ROWS = 32
"""The most rows that are the narrow side of the matrix units: 64 rows by 8, 16, 24 or 32 columns at a time."""

_BYTES = (torch.bool, torch.int8, torch.uint8)  # any float type holds them exactly


def unrolled(kernel: Kernel, device: Device) -> Kernel:
    """Return `kernel` with its contractions as sums, one for each of the few rows; the same object where there are
    none.
    """
    folds = list(statements(kernel.body, Fold))
    sides = {_few(kernel, fold, device) for fold in folds}
    few = next(iter(sides), None)
    if few is None or len(sides) > 1 or len({fold.over for fold in folds}) > 1 or kernel.then is not None:
        return kernel
    if any(fold.carry is not None or _reads_fold(fold) for fold in folds):
        return kernel
    points = list(_points(kernel, few))
    if len(points) * len(folds) > 2 * ROWS_PER_THREAD:
        return kernel
    axes = tuple(axis for axis in kernel.axes if axis.symbol not in few)
    return replace(kernel, axes=axes, body=_unroll(kernel, folds, points))


def _reads_fold(fold: Fold) -> bool:
    """Return whether a statement reads the result of another fold."""
    return any(isinstance(node, TileRef) for node in postorder(*fold.args))


def is_narrow(kernel: Kernel, rows: Collection[sympy.Symbol], columns: Collection[sympy.Symbol]) -> bool:
    """Return whether one side of a contraction has so few rows that the other one should fill the 64 rows of the matrix
    units.
    """
    sizes = kernel.axis_sizes()
    count, longer = (math.prod((sizes[symbol] for symbol in side), start=sympy.Integer(1)) for side in (rows, columns))
    return bool(count.is_Integer and count <= NARROW_ROWS and (not longer.is_Integer or longer >= 2 * NARROW_ROWS))


def _few(kernel: Kernel, fold: Fold, device: Device) -> frozenset[sympy.Symbol] | None:
    """Return the axes of the side of a `dot` that has few rows, if sums of products of the other operand are fast."""
    if fold.op != "dot":
        return None
    sizes = {axis.symbol: axis.size for axis in kernel.with_role(Role.GRID)}
    for side, other, operand in ((fold.rows, fold.columns, fold.args[1]), (fold.columns, fold.rows, fold.args[0])):
        if not side or not all(symbol in sizes and sizes[symbol].is_Integer for symbol in side):
            continue
        count = math.prod(int(sizes[symbol]) for symbol in side)
        longer = sympy.Mul(*(sizes[symbol] for symbol in other if symbol in sizes))
        most = ROWS_PER_THREAD
        if fold.args[0].dtype in HALVES and _of_bytes(operand, set(other)):
            alone = sum(isinstance(stmt, Fold) for stmt in statements(kernel.body)) == 1
            filled = bool(longer.is_Integer and longer >= FILLED * device.multiprocessors)
            filled = filled and (alone or not _in_groups(fold, kernel.axis_sizes()))
            most = 0 if filled and _is_packed(operand, fold.over, set(other)) else 1
        if not 0 < count <= most or longer == 0:
            continue
        if _is_contiguous(operand, fold.over, set(other)) or (count == 1 and _bytes_across(operand, fold.over, other)):
            return frozenset(side)
    return None


def _is_contiguous(operand: Expr, over: Sequence[sympy.Symbol], other: set[sympy.Symbol]) -> bool:
    """Return whether the widest loads of `operand` are contiguous along an axis of `over`, perhaps with neighbours in
    one element.
    """
    offsets = [load.index[0] for load in loads(operand) if not isinstance(load.index[0], Expr)]
    wide = [offset for offset in offsets if other & offset.free_symbols]
    return any(coefficient(_with_stored_axis(offset, axis), axis) == 1 for offset in wide for axis in over)


def _is_packed(operand: Expr, over: Sequence[sympy.Symbol], other: set[sympy.Symbol]) -> bool:
    """Return whether neighbours along `over` share a loaded element of the matrix, as 4-bit weights share a byte."""
    offsets = [load.index[0] for load in loads(operand) if load.dtype in _BYTES]
    wide = [offset for offset in offsets if not isinstance(offset, Expr) and other & offset.free_symbols]
    return any(_with_stored_axis(offset, axis) != offset for offset in wide for axis in over)


def _in_groups(fold: Fold, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> bool:
    """Return whether a value, such as a scale, is the same for more neighbours along the summed axis than share an
    element.
    """
    indices = [index for node in postorder(*fold.args) for index in index_of(node)]
    return any(point > MOST_PACKED for axis in fold.over for point in split_points(indices, axis, sizes[axis]))


def _bytes_across(operand: Expr, over: Sequence[sympy.Symbol], other: Sequence[sympy.Symbol]) -> bool:
    """Return whether `operand` loads a matrix [k, n] of bytes whose contiguous axis is n (`other`), not k (`over`)."""
    offsets = [load.index[0] for load in loads(operand) if load.dtype in _BYTES]
    tall = [offset for offset in offsets if not isinstance(offset, Expr) and offset.free_symbols & set(over)]
    return any(coefficient(offset, axis) == 1 for offset in tall for axis in other)


def _of_bytes(operand: Expr, other: set[sympy.Symbol]) -> bool:
    """Return whether the widest loads of `operand` are loads of single bytes."""
    wide = [load for load in loads(operand) if any(other & index.free_symbols for index in index_of(load))]
    return any(load.dtype in _BYTES for load in wide)


def _with_stored_axis(offset: sympy.Expr, axis: sympy.Symbol) -> sympy.Expr:
    """Return `offset` with `axis // n`, the stored element of which `packed` makes an axis, replaced by the axis."""
    by = {atom: atom.args[1] for atom in offset.atoms(FloorDiv) if atom.args[0] == axis}
    return offset.xreplace({atom: axis for atom, count in by.items() if count.is_Integer and count <= MOST_PACKED})


def _points(kernel: Kernel, few: frozenset[sympy.Symbol]) -> Iterator[dict[sympy.Symbol, sympy.Expr]]:
    """Yield every point of the axes `few`."""
    axes = [axis for axis in kernel.axes if axis.symbol in few]
    for values in itertools.product(*(range(int(axis.size)) for axis in axes)):
        yield {axis.symbol: sympy.Integer(value) for axis, value in zip(axes, values, strict=True)}


def _unroll(
    kernel: Kernel, folds: Sequence[Fold], points: Sequence[Mapping[sympy.Symbol, sympy.Expr]]
) -> tuple[Stmt, ...]:
    sizes = kernel.axis_sizes()

    def at(stmt: Stmt, number: int, point: Mapping[sympy.Symbol, sympy.Expr]) -> Stmt:
        if isinstance(stmt, Store):
            names = {fold.ref: _sum(folds, fold, number, len(points)) for fold in folds}
            return _stored(stmt, names, point, sizes)
        assert isinstance(stmt, Fold), "a kernel with a contraction has no scan"
        lhs, rhs = (widened(arg, stmt.dtype) for arg in substitute_all(stmt.args, point, sizes))
        name = _sum(folds, stmt, number, len(points))
        return Fold(name, "sum", (Op("mul", (lhs, rhs), stmt.dtype),), stmt.over, stmt.dtype)

    def at_points(stmt: Stmt) -> Stmt | tuple[Stmt, ...]:
        return stmt if isinstance(stmt, Loop) else tuple(at(stmt, *numbered) for numbered in enumerate(points))

    return map_statements(kernel.body, at_points)


def _sum(folds: Sequence[Fold], fold: Fold, point: int, points: int) -> str:
    """Return the name of the sum that replaces `fold` at one of the points."""
    return f"sum{folds.index(fold) * points + point}"


def _stored(
    stmt: Store,
    names: Mapping[Expr, str],
    point: Mapping[sympy.Symbol, sympy.Expr],
    sizes: Mapping[sympy.Symbol, sympy.Expr],
) -> Store:
    """Return a store at one of the points, of the sums of that point."""

    def renamed(node: Expr) -> Expr | None:
        return TileRef(names[node], node.dtype) if node in names else None

    value = rewrite(substitute_all([stmt.value], point, sizes), renamed)[0]
    if isinstance(stmt.offset, Expr):
        return replace(stmt, offset=substitute_all([stmt.offset], point, sizes)[0], value=value)
    return replace(stmt, offset=simplify(stmt.offset.xreplace(dict(point)), sizes), value=value)


def widened(expr: Expr, dtype: torch.dtype) -> Expr:
    """Return `expr` as `dtype`; a byte is converted directly, not by way of a 16-bit float, which holds it exactly."""

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Cast) or not node.dtype.is_floating_point or not isinstance(node.arg, Cast):
            return None
        byte = node.arg.arg
        return make_cast(byte, node.dtype) if node.arg.dtype in HALVES and byte.dtype in _BYTES else None

    return rewrite([make_cast(expr, dtype)], rule)[0]
