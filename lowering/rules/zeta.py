"""Lowers Hurwitz's zeta function, and with it the derivatives of the digamma function.

ζ(s, q) = Σ 1 / (q + k)ˢ is summed up to an argument from which on the Euler-Maclaurin series holds.  Below 0, where
only whole s have a value, the terms with negative arguments are a difference of two values above 0.  All is computed in
float64, whose digits are needed near a pole.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import Term, call, eq, isnan, literal, ne, where
from fusion.lowering.rules.promotion import Argument, Kind, compose
from fusion.lowering.rules.special import ASYMPTOTIC, BERNOULLI, digamma, polynomial
from fusion.lowering.value import Value

aten = torch.ops.aten

MOVED = 10
"""By how much the argument is shifted, so that the series has all digits of float64 for s up to about 10."""

Power = Callable[[Term], Term]
"""Returns x to the power of -s, for x > 0."""


def _above(q: Term, s: Term, power: Power) -> Term:
    """ζ(s, q) for q > 0 and s > 1."""
    total = Term(literal(0, q.dtype))
    for k in range(MOVED):
        total = total + power(q + k)
    at = q + MOVED
    end = power(at)
    total = total + end * at / (s - 1) + 0.5 * end
    factor, rising = end / at, s
    for k, bernoulli in enumerate(BERNOULLI, 1):
        total = total + factor * rising * (bernoulli / math.factorial(2 * k))
        rising = rising * (s + (2 * k - 1)) * (s + 2 * k)
        factor = factor / (at * at)
    return total


def _zeta(s: Term, q: Term, power: Power) -> Term:
    floor = call("floor", q)
    negative = q <= 0
    whole = eq(call("floor", s), s)
    fraction = q - floor
    held = where(negative, where(eq(fraction, 0), 1, fraction), q)  # at a pole, any finite number
    odd = ne(call("fmod", s, 2), 0)
    below = _above(1 - held, s, power) - _above(where(negative, 1 - q, q + 1), s, power)
    value = _above(held, s, power)
    turned = value + where(odd, -below, below)
    below_zero = where(eq(fraction, 0), math.inf, where(whole, turned, math.nan))
    result = where(negative, below_zero, value)
    result = where(eq(s, 1), math.inf, where(s < 1, math.nan, result))
    return where(isnan(s) | isnan(q), s + q, result)


@lowers(aten.special_zeta.default, aten.special_zeta.self_scalar, aten.special_zeta.other_scalar)
def zeta(ctx: Builder, s: Argument, q: Argument) -> Value:
    """ζ(s, q): infinite at s = 1 and at whole q up to 0, NaN below 1 and for other s below 0."""

    def formula(order: Term, x: Term) -> Term:
        s = order.to(torch.float64)
        return _zeta(s, x.to(torch.float64), lambda at: call("pow", at, -s)).to(x.dtype)

    return compose(formula, s, q, kind=Kind.INT_TO_FLOAT)


@lowers(aten.polygamma.default)
def polygamma(ctx: Builder, n: int, x: Value) -> Value:
    """The n-th derivative of ψ: (-1)ⁿ⁺¹ n! ζ(n + 1, x)."""
    if n == 0:
        return compose(digamma, x, kind=Kind.INT_TO_FLOAT)
    if n == 1:
        return compose(trigamma, x, kind=Kind.INT_TO_FLOAT)
    if n > 20:
        raise Unsupported(f"derivative {n} of the digamma function")
    sign = 1 if n % 2 else -1

    def formula(a: Term) -> Term:
        order = Term(literal(n + 1, torch.float64))
        value = _zeta(order, a.to(torch.float64), lambda at: _inverse(at, n + 1))
        return (sign * math.factorial(n) * value).to(a.dtype)

    return compose(formula, x, kind=Kind.INT_TO_FLOAT)


def _inverse(x: Term, power: int) -> Term:
    result = x
    for _ in range(power - 1):
        result = result * x
    return 1 / result


def trigamma(x: Term) -> Term:
    """ψ′(x): by reflection below ½, shifted to where its asymptotic series holds."""
    reflected = x < 0.5
    start = where(reflected, 1 - x, x)
    total, at = Term(literal(0, x.dtype)), start
    for _ in range(ASYMPTOTIC):
        small = at < ASYMPTOTIC
        total = total + where(small, 1 / (at * at), 0)
        at = at + small.to(at.dtype)
    square = 1 / (at * at)
    value = total + 1 / at + 0.5 * square + polynomial(square, BERNOULLI) * square / at
    sine = call("sin", math.pi * (x - call("round", x)))
    return where(reflected, math.pi * math.pi / (sine * sine) - value, value)
