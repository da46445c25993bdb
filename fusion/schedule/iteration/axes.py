"""Simplifies the axes of a kernel: drops, orders and merges them.

An axis of size 1 is dropped.  The others are ordered by their strides in the largest access, and two neighbours become
one axis where every index treats them as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sympy

from fusion.lowering.indexing import ZERO, FloorDiv, Mod, coefficient, simplify, substitute_all
from fusion.lowering.ir.expr import Expr, Index, Load, index_of, postorder
from fusion.lowering.ir.program import Axis
from fusion.lowering.ir.sizes import estimate


def drop_ones(axes: Sequence[Axis]) -> tuple[tuple[Axis, ...], dict[sympy.Symbol, sympy.Expr]]:
    """Return the axes longer than 1, and the replacement of the others."""
    kept = tuple(axis for axis in axes if axis.size != 1)
    return kept, {axis.symbol: ZERO for axis in axes if axis.size == 1}


def order_by_stride(axes: Sequence[Axis], accesses: Sequence[sympy.Expr]) -> tuple[Axis, ...]:
    """Return `axes` with the widest stride first, in the access that spans most of them (the first of equals)."""
    if len(axes) < 2 or not accesses:
        return tuple(axes)
    symbols = {axis.symbol for axis in axes}
    leading = max(accesses, key=lambda access: len(access.free_symbols & symbols))
    strides: dict[sympy.Symbol, int] = {}
    for axis in axes:
        strides_in_accesses = [_stride(access, axis.symbol) for access in (leading, *accesses)]
        strides[axis.symbol] = next((s for s in strides_in_accesses if s), 0)
    return tuple(sorted(axes, key=lambda axis: -strides[axis.symbol]))


def _stride(access: sympy.Expr, symbol: sympy.Symbol) -> int:
    stride = coefficient(access, symbol)
    if stride is None:
        return 0
    return abs(estimate(stride, {}))


def merge(
    axes: Sequence[Axis], indices: Iterable[sympy.Expr]
) -> tuple[tuple[Axis, ...], dict[sympy.Symbol, sympy.Expr]]:
    """Merge neighbours that every index treats as one axis; return the axes and their replacements.

    An axis without points has no remainders, and stays.
    """
    merged = list(axes)
    exprs = list(dict.fromkeys(indices))
    change: dict[sympy.Symbol, sympy.Expr] = {}
    k = len(merged) - 2
    while k >= 0:
        outer, inner = merged[k], merged[k + 1]
        if inner.size != 0 and all(_as_one(expr, outer, inner) for expr in exprs):
            merged_axis = Axis(inner.symbol, outer.size * inner.size)
            parts = {outer.symbol: FloorDiv(inner.symbol, inner.size), inner.symbol: Mod(inner.symbol, inner.size)}
            merged[k : k + 2] = [merged_axis]
            sizes = {axis.symbol: axis.size for axis in merged}
            exprs = [simplify(expr.xreplace(parts), sizes) for expr in exprs]
            change = {axis: simplify(expr.xreplace(parts), sizes) for axis, expr in change.items()}
            for symbol, part in parts.items():  # an axis merged before is already expressed through this one
                change.setdefault(symbol, part)
        k -= 1
    return tuple(merged), change


def _as_one(expr: sympy.Expr, outer: Axis, inner: Axis) -> bool:
    symbols = expr.free_symbols
    if outer.symbol not in symbols and inner.symbol not in symbols:
        return True
    a, b = coefficient(expr, outer.symbol), coefficient(expr, inner.symbol)
    if a is not None and b is not None:
        return bool(a == b * inner.size) or sympy.expand(a - b * inner.size) == 0
    return False


def indices_of(roots: Iterable[Expr]) -> list[sympy.Expr]:
    """Return every index expression below `roots`."""
    return list(dict.fromkeys(index for node in postorder(*roots) for index in index_of(node)))


def accesses_of(roots: Iterable[Expr]) -> list[sympy.Expr]:
    """Return the affine offsets of all loads below `roots`."""
    offsets = (node.index[0] for node in postorder(*roots) if isinstance(node, Load))
    return [offset for offset in offsets if not isinstance(offset, Expr)]


def replace_in(
    roots: Sequence[Expr],
    offsets: Sequence[Index],
    change: Mapping[sympy.Symbol, sympy.Expr],
    sizes: Mapping[sympy.Symbol, sympy.Expr],
) -> tuple[list[Expr], list[Index]]:
    """Replace axes in expressions and offsets."""
    if not change:
        return list(roots), list(offsets)
    indirect = [offset for offset in offsets if isinstance(offset, Expr)]
    replaced = substitute_all([*roots, *indirect], change, sizes)
    rest = iter(replaced[len(roots) :])
    affine_change = dict(change)
    moved: list[Index] = [
        next(rest) if isinstance(offset, Expr) else simplify(offset.xreplace(affine_change), sizes)
        for offset in offsets
    ]
    return replaced[: len(roots)], moved
