"""Lowers Chebyshev polynomials of the four kinds, at x or shifted to [0, 1], of orders that are data.

Low orders by the recurrence pₖ₊₁ = 2x·pₖ - pₖ₋₁, as in eager; higher ones by their angle: cos θ = x inside [-1, 1],
cosh θ = |x| outside.  An order below 0 gives 0.  Hermite, Laguerre and Legendre polynomials of data-dependent order
have no such form; they stay calls.  All is computed in float64: by the angle, the error is multiplied by the order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._ops import OpOverloadPacket

from fusion.lowering.builder import Builder
from fusion.lowering.ir.scalar_ops import ScalarName
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import Term, absolute, call, eq, exp, literal, log, maximum, minimum, ne, sqrt, where
from fusion.lowering.rules.promotion import Argument, Kind, compose, overloads
from fusion.lowering.value import Value

aten = torch.ops.aten

LOW = 8
"""The highest order that is computed by the recurrence."""


@dataclass(frozen=True, slots=True)
class Family:
    """One kind: p₁ = slope·x + offset, and pₙ as a quotient of sines or cosines of multiples of half the angle.

    Attributes:
        above: (n + above)·θ is the argument of the numerator.
        even: whether the numerator is a cosine, else a sine.
        half: whether the denominator is of θ/2, else of θ; None for the first kind, which has none.
    """

    slope: int
    offset: int
    above: float
    even: bool
    half: bool | None


KINDS = {
    "t": Family(1, 0, 0.0, True, None),
    "u": Family(2, 0, 1.0, False, False),
    "v": Family(2, -1, 0.5, True, True),
    "w": Family(2, 1, 0.5, False, True),
}


def _recurrence(family: Family, x: Term, n: Term) -> Term:
    older, newer = Term(literal(1, x.dtype)), family.slope * x + family.offset
    result = where(eq(n, 0), older, newer)
    for order in range(2, LOW + 1):
        older, newer = newer, 2 * x * newer - older
        result = where(eq(n, order), newer, result)
    return result


def _by_angle(family: Family, x: Term, n: Term) -> Term:
    """Evaluate a polynomial of an order above `LOW` as a cosine or sine of a multiple of θ = acos x."""
    inside = absolute(x) < 1
    theta = call("acos", maximum(minimum(x, 1), -1))
    wave: ScalarName = "cos" if family.even else "sin"
    turns = n + family.above
    value = call(wave, turns * theta)
    if family.half is not None:
        value = value / call(wave, theta * 0.5 if family.half else theta)
    return where(inside, value, _outside(family, x, n))


def _outside(family: Family, x: Term, n: Term) -> Term:
    """Evaluate the polynomial for |x| ≥ 1, where the angle is imaginary; below -1 the third and fourth kinds swap, with
    a sign.
    """
    size = maximum(absolute(x), 1)
    growth = log(size + sqrt((size - 1) * (size + 1)))
    negative, odd = x < 0, ne(call("fmod", n, 2), 0)

    def hyperbolic(even: bool, angle: Term) -> Term:
        up, down = exp(angle), exp(-angle)
        return (up + down) * 0.5 if even else (up - down) * 0.5

    def of(even: bool) -> Term:
        value = hyperbolic(even, (n + family.above) * growth)
        if family.half is None:
            return value
        return value / hyperbolic(even, growth * 0.5 if family.half else growth)

    value = of(family.even)
    if family.half:
        value = where(negative, of(not family.even), value)
        limit = where(negative, 2 * n + 1, 1) if family.even else where(negative, 1, 2 * n + 1)
    else:
        limit = n + 1 if family.half is False else n * 0 + 1
    value = where(eq(absolute(x), 1), limit, value)
    return where(negative & odd, -value, value)


def _register(packet: OpOverloadPacket, family: Family, shifted: bool) -> None:
    @lowers(*overloads(packet))
    def rule(ctx: Builder, x: Argument, n: Argument) -> Value:
        def formula(a: Term, order: Term) -> Term:
            x, degree = a.to(torch.float64), call("trunc", order.to(torch.float64))
            argument = 2 * x - 1 if shifted else x
            value = where(degree <= LOW, _recurrence(family, argument, degree), _by_angle(family, argument, degree))
            return where(degree < 0, 0, value).to(a.dtype)

        return compose(formula, x, n, kind=Kind.INT_TO_FLOAT)


for _kind, _family in KINDS.items():
    _register(getattr(aten, f"special_chebyshev_polynomial_{_kind}"), _family, shifted=False)
    _register(getattr(aten, f"special_shifted_chebyshev_polynomial_{_kind}"), _family, shifted=True)
