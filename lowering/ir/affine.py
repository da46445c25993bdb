"""Reads symbols, strides and extents from indices and shapes, without bounds of axes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import sympy

from fusion.lowering.ir.division import ONE, ZERO


@lru_cache(maxsize=1 << 16)
def symbols_of(expr: sympy.Expr) -> tuple[sympy.Symbol, ...]:
    """Return the symbols of an index, sorted by name; cached, because sympy traverses the expression each time."""
    return tuple(sorted(expr.free_symbols, key=str))


def extent_of(shape: Sequence[sympy.Expr], strides: Sequence[sympy.Expr]) -> sympy.Expr:
    """Return the number of elements from the first to the last one touched, inclusive (0 for an empty tensor)."""
    if any(size == 0 for size in shape):
        return ZERO
    return sympy.Add(1, *((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))


def coefficient(expr: sympy.Expr, axis: sympy.Symbol) -> sympy.Expr | None:
    """Return the stride of `axis` in an affine offset; None where the axis appears under `//`, `%` or a power.

    >>> from fusion.lowering.indexing import FloorDiv, axis_symbol
    >>> i, j = axis_symbol(0), axis_symbol(1)
    >>> coefficient(12 * i + j, i), coefficient(12 * i + j, axis_symbol(2)), coefficient(FloorDiv(i, 2), i)
    (12, 0, None)
    """
    stride: sympy.Expr = ZERO
    if axis not in symbols_of(expr):
        return stride
    for term in sympy.Add.make_args(sympy.expand_mul(expr)):
        if axis in symbols_of(term):
            ratio = ONE if term is axis else term / axis
            if axis in symbols_of(ratio):
                return None
            stride += ratio
    return stride
