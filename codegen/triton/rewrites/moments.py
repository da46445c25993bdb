"""Sums the deviations of a row from its mean, and their squares, without the mean.

    s = Σ x                                  s = n·p + a      with a = Σ (x - p), b = Σ (x - p)², a pivot p
    d = Σ (x - s/n)              becomes     d = a + n·g      and the gap g = p - s/n
    v = Σ (x - s/n)²                         v = b + g·(2a + n·g)

Input: a kernel; output: an equal one in which these sums do not need each other, so that one loop computes them: a row
or column that a program does not hold is read once instead of twice.  v is not below 0, as a sum of squares.  A mean
that is computed relative to the first element of its row (`schedule/launches/shift_means.py`) has this pivot instead.

The pivot is the median of three elements of the row.  Differences from it are small, however far the mean is from 0,
and it is no outlier unless two of the three are.  From an outlier, whose squared deviation may be n times the variance,
v would lose log2(n) bits.  So the elements have to be 16-bit floats, whose own rounding is larger than that of these
sums, and to be loaded at little cost.  (measured: docs/performance.md, `moments`)

Source: Chan, Golub, LeVeque: Algorithms for Computing the Sample Variance, 1983 (shifted data).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from sympy import Rational, floor

from fusion.codegen.triton.rewrites.blocked_loops import in_blocks
from fusion.lowering.indexing import substitute
from fusion.lowering.ir.expr import (
    Expr,
    Op,
    TileRef,
    const,
    free_axes,
    is_of_static_loads,
    loads,
    make_op,
    postorder,
    rewrite,
)
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Prefix, Stmt, Store, statements, values_of, with_values
from fusion.lowering.ir.scalar_ops import HALVES

_CHEAP = 8
"""Operations that one more element of a row may cost: three are computed in each program beside its loop."""

_PLACES = (Rational(1, 5), Rational(1, 3), Rational(3, 4))
"""The places of these three along a row, as shares of its length."""


@dataclass(frozen=True, slots=True)
class _Moments:
    """A sum of `count` elements, relative to `base` if there is one, and sums of deviations from its mean and of their
    squares.
    """

    total: Fold
    base: Expr | None
    count: Expr
    deviations: tuple[Fold, ...]
    squares: tuple[Fold, ...]


def without_means(kernel: Kernel) -> Kernel:
    """Return the kernel with such sums independent of each other; the same object if there are none."""
    for found in list(_moments(kernel)):
        kernel = replace(kernel, body=_rewritten(kernel, found))
    return kernel


def without_means_in_loops(kernel: Kernel) -> Kernel:
    """Return a kernel with loops along rows in which one loop has all such sums; the same object if there are none."""
    loops = [stmt for stmt in kernel.body if isinstance(stmt, Loop)]
    inner = list(statements(kernel.body))
    if len(loops) < 2 or any((loop.axes, loop.where) != (loops[0].axes, None) for loop in loops):
        return kernel
    if any(isinstance(stmt, Prefix) or (isinstance(stmt, Fold) and stmt.carry is not None) for stmt in inner):
        return kernel
    flat = replace(kernel, body=tuple(stmt for stmt in inner if not isinstance(stmt, Loop)))
    changed = without_means(flat)
    return kernel if changed is flat else in_blocks(changed, loops[0].axes)


def _moments(kernel: Kernel) -> Iterator[_Moments]:
    """Yield the sums from whose means other sums over the same axes take deviations."""
    sums = [stmt for stmt in kernel.body if isinstance(stmt, Fold) and _is_sum(stmt)]
    changed = {stmt.param for stmt in statements(kernel.body, Store) if stmt.axes is not None}
    sizes = kernel.axis_sizes()
    for total in sums:
        row, base = _relative(total)
        length = sympy.Mul(*(sizes[axis] for axis in total.over))
        if not length.is_Integer or not _is_cheap(row) or not _is_of_halves(row, total.over):
            continue
        if any(load.buffer in changed for load in loads(row)):
            continue
        count = const(int(length), total.dtype)
        mean = make_op("truediv", total.ref, count)
        deviation = make_op("sub", row, mean if base is None else make_op("add", base, mean))
        others = [other for other in sums if (other.over, other.dtype) == (total.over, total.dtype)]
        deviations = tuple(other for other in others if other.args == (deviation,))
        squares = tuple(other for other in others if other.args == (make_op("mul", deviation, deviation),))
        if deviations or squares:
            yield _Moments(total, base, count, deviations, squares)


def _is_sum(fold: Fold) -> bool:
    return fold.op == "sum" and fold.dtype.is_floating_point and fold.carry is None


def _relative(total: Fold) -> tuple[Expr, Expr | None]:
    """Return the elements of a sum, and the value of their row that is subtracted from each, if there is one."""
    (row,) = total.args
    if isinstance(row, Op) and row.name == "sub" and free_axes(row.args[1]).isdisjoint(total.over):
        elements, base = row.args
        return elements, base
    return row, None


def _is_cheap(row: Expr) -> bool:
    """Return whether `row` is computed from loads by few operations."""
    return is_of_static_loads(row) and sum(isinstance(node, Op) for node in postorder(row)) <= _CHEAP


def _is_of_halves(row: Expr, over: Sequence[sympy.Symbol]) -> bool:
    """Return whether all elements of a row are computed from 16-bit floats."""
    moving = [load for load in loads(row) if not free_axes(load).isdisjoint(over)]
    return bool(moving) and all(load.dtype in HALVES for load in moving)


def _rewritten(kernel: Kernel, found: _Moments) -> tuple[Stmt, ...]:
    """Return the statements of a kernel with these sums relative to an element of the row."""
    total, count = found.total, found.count
    row, base = _relative(total)
    pivot = _pivot(row, total.over, kernel.axis_sizes())
    near = make_op("sub", row, pivot)
    distance = pivot if base is None else make_op("sub", pivot, base)
    whole = make_op("add", make_op("mul", count, distance), total.ref)
    mean = make_op("truediv", whole, count)
    gap = make_op("sub", pivot, mean if base is None else make_op("add", base, mean))
    moved = make_op("mul", count, gap)
    twice = make_op("add", make_op("add", total.ref, total.ref), moved)
    results = {total.ref: whole}
    results |= {fold.ref: make_op("add", total.ref, moved) for fold in found.deviations}
    for fold in found.squares:
        square = make_op("add", fold.ref, make_op("mul", gap, twice))
        results[fold.ref] = make_op("maximum", square, const(0, fold.dtype))

    def rule(node: Expr) -> Expr | None:
        return results.get(node) if isinstance(node, TileRef) else None

    body: list[Stmt] = []
    for stmt in kernel.body:
        if stmt == total:
            body.append(replace(total, args=(near,)))
        elif stmt in found.squares:
            assert isinstance(stmt, Fold)
            body.append(replace(stmt, args=(make_op("mul", near, near),)))
        elif stmt not in found.deviations:
            body.append(with_values(stmt, rewrite(values_of(stmt), rule)))
    return tuple(body)


def _pivot(row: Expr, over: Sequence[sympy.Symbol], sizes: Mapping[sympy.Symbol, sympy.Expr]) -> Expr:
    """Return the median of three elements, at places that are special in no layout, as the ends of a row would be."""
    places = ({axis: floor(share * sizes[axis]) for axis in over} for share in _PLACES)
    first, second, third = (substitute(row, place, sizes) for place in places)
    least, most = make_op("minimum", first, second), make_op("maximum", first, second)
    return make_op("maximum", least, make_op("minimum", most, third))


__all__ = ["without_means", "without_means_in_loops"]
