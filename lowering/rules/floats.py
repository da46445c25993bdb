"""Lowers the parts of a float: its exponent, and its neighbours.

Bits are not accessible: an exponent is a logarithm, corrected by comparisons.  It is computed in float64, which holds
every narrower float and twice its exponents exactly; for float64 itself the calls stay.
"""

from __future__ import annotations

import math

import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import Term, absolute, call, eq, isinf, isnan, literal, maximum, where
from fusion.lowering.rules.promotion import combine, compose, convert, rounded
from fusion.lowering.value import Value

aten = torch.ops.aten


def _decomposed(x: Term) -> tuple[Term, Term]:
    """(mantissa in [½, 1), exponent) of a finite number other than 0, as float64."""
    size = absolute(x)
    exponent = call("floor", call("log2", size)) + 1
    mantissa = size * call("exp2", -exponent)
    high, low = mantissa >= 1, mantissa < 0.5
    exponent = exponent + high.to(x.dtype) - low.to(x.dtype)
    return where(high, mantissa * 0.5, where(low, mantissa * 2, mantissa)), exponent


def _narrow(x: Value) -> Value:
    if not x.dtype.is_floating_point or x.dtype is torch.float64:
        raise Unsupported(f"the exponent of {x.dtype}")
    return convert(x, torch.float64)


@lowers(aten.frexp.Tensor)
def frexp(ctx: Builder, x: Value) -> tuple[Value, ...]:
    """(mantissa, exponent) with x = mantissa·2^exponent; 0, infinities and NaN are their own mantissa."""

    def is_plain(a: Term) -> Term:
        return ~(eq(a, 0) | isinf(a) | isnan(a))

    def mantissa(a: Term) -> Term:
        plain = is_plain(a)
        part, _ = _decomposed(where(plain, a, 1))
        return where(plain, where(a < 0, -part, part), a)

    def exponent(a: Term) -> Term:
        plain = is_plain(a)
        return where(plain, _decomposed(where(plain, a, 1))[1], 0)

    wide = _narrow(x)
    return rounded(combine(mantissa, wide), x.dtype), convert(combine(exponent, wide), torch.int32)


@lowers(aten.nextafter.default)
def nextafter(ctx: Builder, x: Value, towards: Value) -> Value:
    """The number of x's dtype next to x in the direction of another one."""
    if x.dtype is not towards.dtype:
        raise Unsupported(f"the neighbour of {x.dtype} towards {towards.dtype}")
    info = torch.finfo(x.dtype)
    least = info.smallest_normal * info.eps  # the smallest number above 0

    def formula(a: Term, b: Term) -> Term:
        # Numbers near a are at most eps·|a| apart and more than half as far: a step between half of their distance and
        # one and a half times it is rounded to the neighbour, also where they are twice as dense below.
        step = maximum(absolute(a) * (0.625 * info.eps), least)
        one = Term(literal(1.0, a.dtype))
        direction = where(b > a, one, -one)
        moved = a + direction * step
        moved = where(eq(moved, 0), a * 0, moved)
        moved = where(eq(a, 0), direction * least, moved)
        moved = where(absolute(moved) > info.max, direction * math.inf, moved)
        moved = where(isinf(a), -direction * info.max, moved)
        return where(isnan(a) | isnan(b), a + b, where(eq(a, b), b, moved))

    neighbour = compose(formula, _narrow(x), _narrow(towards))
    return rounded(neighbour, x.dtype)
