"""Recognises positions that are computed in floating point without rounding, such as half of an index, truncated.

Nearest neighbours in an image of half the size are read at `(i * 0.5).to(int64)`.  Where each step is exact, that is
the index `i // 2`: known to be contiguous, and in bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite

import sympy
import torch

from fusion.lowering.indexing import FloorDiv, Sizes, simplify
from fusion.lowering.indexing.intervals import expanded, interval
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Op
from fusion.lowering.ir.scalar_ops import ScalarName

_SIGNIFICANT: Mapping[torch.dtype, int] = {torch.float32: 24, torch.float64: 53}
"""The bits of a number's significand."""

_Fraction = tuple[sympy.Expr, int]
"""An integer over the axes, and the exponent of the power of two by which it is divided."""

_COMBINED: Mapping[ScalarName, Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
}


def truncated(number: Expr, sizes: Sizes) -> sympy.Expr | None:
    """Return the index that a floating-point number of at least 0 has as an integer; None if it may be rounded.

    >>> i = sympy.Symbol("i0", integer=True, nonnegative=True)
    >>> half = Op("mul", (Cast(IndexValue(i), torch.float32), Const(0.5, torch.float32)), torch.float32)
    >>> truncated(half, {i: sympy.Integer(64)})
    i0//2
    """
    fraction = _fraction(number, sizes)
    if fraction is None:
        return None
    integer, halvings = fraction
    limits = interval(integer, sizes)
    if limits is None or limits[0] < 0:
        return None
    return simplify(FloorDiv(integer, sympy.Integer(1 << halvings)), sizes)


def _fraction(number: Expr, sizes: Sizes) -> _Fraction | None:
    """Return the exact value of a number; None where it is unknown, or does not fit its significand."""
    fraction = _computed(number, sizes)
    if fraction is None:
        return None
    limits, most = interval(fraction[0], sizes), 1 << _SIGNIFICANT.get(number.dtype, 0)
    return fraction if limits is not None and max(map(abs, limits)) <= most else None


def _computed(number: Expr, sizes: Sizes) -> _Fraction | None:
    match number:
        case IndexValue():
            return number.index, 0
        case Cast() if isinstance(number.arg, IndexValue) and number.arg.dtype is torch.int64:
            return number.arg.index, 0
        case Cast() if number.arg.dtype in _SIGNIFICANT:
            return _fraction(number.arg, sizes)
        case Const() if isinstance(number.value, float) and isfinite(number.value):
            integer, divisor = number.value.as_integer_ratio()
            return sympy.Integer(integer), divisor.bit_length() - 1
        case Op() if number.name in _COMBINED:
            first, second = (_fraction(arg, sizes) for arg in number.args)
            return None if first is None or second is None else _combined(number.name, first, second)
        case _:
            return None


def _combined(name: ScalarName, first: _Fraction, second: _Fraction) -> _Fraction:
    """Return the sum, difference or product of two fractions."""
    (a, divided), (b, by) = first, second
    if name == "mul":
        return expanded(a * b), divided + by
    common = max(divided, by)
    return expanded(_COMBINED[name](a * (1 << (common - divided)), b * (1 << (common - by)))), common
