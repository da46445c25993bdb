"""Bounds the values of an index, and lists its symbols."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, reduce
from typing import TypeAlias

import sympy

from fusion.lowering.ir.affine import symbols_of
from fusion.lowering.ir.division import FloorDiv, Mod

Sizes: TypeAlias = Mapping[sympy.Symbol, sympy.Expr]


def axis_symbol(k: int) -> sympy.Symbol:
    """Return the symbol of a node's k-th axis: `i0`, `i1`, …; equal nodes get equal names and so equal text."""
    return _symbol("i", k)


def over_symbol(k: int) -> sympy.Symbol:
    """Return the symbol of the k-th axis that a node reduces over: `r0`, `r1`, …"""
    return _symbol("r", k)


@lru_cache(maxsize=1024)
def _symbol(prefix: str, k: int) -> sympy.Symbol:
    return sympy.Symbol(f"{prefix}{k}", integer=True, nonnegative=True)


Facts: TypeAlias = tuple[tuple[sympy.Symbol, sympy.Expr], ...]
"""The sizes of the symbols of one expression; with the expression, a cache key."""


def facts_of(expr: sympy.Expr, sizes: Sizes) -> Facts:
    """Return the axes of `expr` with their sizes, as a cache key: all that a law reads of `sizes`."""
    return tuple((symbol, sizes[symbol]) for symbol in symbols_of(expr) if symbol in sizes)


def bounds(expr: sympy.Expr, sizes: Sizes) -> tuple[sympy.Expr, sympy.Expr] | None:
    """Return the least and greatest value of `expr`, inclusive; None where they are not known as integers.

    The bounds are attained if no symbol occurs twice and no `%` is left.

    >>> i = axis_symbol(0)
    >>> bounds(3 * i + 1, {i: sympy.Integer(4)})
    (1, 10)
    """
    limits = _bounds(expr, facts_of(expr, sizes))
    return None if limits is None else (sympy.Integer(limits[0]), sympy.Integer(limits[1]))


@lru_cache(maxsize=1 << 16)
def _bounds(expr: sympy.Expr, facts: Facts) -> tuple[int, int] | None:
    return interval(expr, dict(facts))


def interval(expr: sympy.Expr, sizes: Sizes) -> tuple[int, int] | None:
    """Compute the bounds of `bounds` in Python's integers, ten times faster than sympy's."""
    if expr.is_Integer:
        return int(expr), int(expr)
    if isinstance(expr, sympy.Symbol):
        size = sizes.get(expr)
        return (0, int(size) - 1) if size is not None and size.is_Integer else None
    parts = [interval(arg, sizes) for arg in expr.args]
    if isinstance(expr, Mod):
        return _remainder(parts[0], int(expr.args[1])) if expr.args[1].is_Integer else None
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if expr.is_Add:
        return sum(low for low, _ in known), sum(high for _, high in known)
    if expr.is_Mul:
        return reduce(_multiplied, known)
    if isinstance(expr, FloorDiv) and expr.args[1].is_Integer:
        (low, high), (divisor, _) = known
        return low // divisor, high // divisor
    if isinstance(expr, sympy.Pow) and known[0][0] >= 0 and expr.exp.is_Integer and expr.exp > 0:
        (low, high), (exponent, _) = known
        return low**exponent, high**exponent
    return None


def _remainder(part: tuple[int, int] | None, divisor: int) -> tuple[int, int]:
    """Bound a remainder: by `part` itself where that lies within the divisor, else by the divisor."""
    return part if part is not None and part[0] >= 0 and part[1] < divisor else (0, divisor - 1)


def _multiplied(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
    corners = [a * b for a in left for b in right]
    return min(corners), max(corners)


def expanded(expr: sympy.Expr) -> sympy.Expr:
    """Return `expr` expanded to a sum of products; atoms are returned unchanged, which avoids a slow call of sympy."""
    return expr if expr.is_Atom else sympy.expand(expr)
