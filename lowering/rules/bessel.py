"""Lowers Bessel functions of orders 0 and 1 and the Airy function, computed in float64: they oscillate.

Near 0 they are series in x or x²; for large arguments a sine and a cosine of the phase, each times a series in the
inverse of the argument: J = √(2/πx)·(P·cos φ - Q·sin φ), Y = √(2/πx)·(P·sin φ + Q·cos φ) with φ = x - π/4 - n·π/2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch._ops import OpOverload

from fusion.lowering.builder import Builder
from fusion.lowering.registry import lowers
from fusion.lowering.rules import bessel_series as series
from fusion.lowering.rules.formula import (
    Term,
    absolute,
    call,
    eq,
    exp,
    isinf,
    isnan,
    log,
    maximum,
    minimum,
    sqrt,
    where,
)
from fusion.lowering.rules.promotion import Kind, compose
from fusion.lowering.rules.special import clenshaw
from fusion.lowering.value import Value

aten = torch.ops.aten

Series = Sequence[float]

BESSEL_NEAR = 8.0
AIRY_NEAR = 2.0
AIRY_TOP = 1.5 / AIRY_NEAR**1.5
"""The largest value of 1/ζ, ζ = ⅔·|x|^1.5, outside the interval of the series around 0."""


def _in_double(*targets: OpOverload) -> Callable[[Callable[[Term], Term]], Callable[[Term], Term]]:
    """Register the decorated formula of one argument, in float64."""

    def register(build: Callable[[Term], Term]) -> Callable[[Term], Term]:
        @lowers(*targets)
        def rule(ctx: Builder, x: Value) -> Value:
            return compose(lambda a: build(a.to(torch.float64)).to(a.dtype), x, kind=Kind.INT_TO_FLOAT)

        return build

    return register


def _far(x: Term, order: int, p: Series, q: Series, *, second: bool) -> Term:
    """The asymptotic form of either kind for x ≥ 8; both vanish at infinity."""
    finite = where(isinf(x), BESSEL_NEAR, x)
    inverse = BESSEL_NEAR / finite
    phase = finite - (math.pi / 4 + order * math.pi / 2)
    sine, cosine = call("sin", phase), call("cos", phase)
    square = inverse * inverse
    straight, crossed = clenshaw(p, square, 0, 1), clenshaw(q, square, 0, 1) * inverse
    wave = straight * sine + crossed * cosine if second else straight * cosine - crossed * sine
    return where(isinf(x), 0, wave * sqrt(2 / (math.pi * finite)))


def _first_kind(x: Term, order: int, near: Series, p: Series, q: Series) -> Term:
    size = absolute(x)
    small = minimum(size, BESSEL_NEAR)
    inside = clenshaw(near, small * small, 0, BESSEL_NEAR * BESSEL_NEAR)
    beyond = _far(maximum(size, BESSEL_NEAR), order, p, q, second=False)
    if order == 0:
        return where(size <= BESSEL_NEAR, inside, beyond)
    return where(size <= BESSEL_NEAR, inside * where(size <= BESSEL_NEAR, x, 0), where(x < 0, -beyond, beyond))


@_in_double(aten.special_bessel_j0.default)
def j0(x: Term) -> Term:
    """J₀(x)."""
    return _first_kind(x, 0, series.J0_NEAR, series.P0_FAR, series.Q0_FAR)


@_in_double(aten.special_bessel_j1.default)
def j1(x: Term) -> Term:
    """J₁(x)."""
    return _first_kind(x, 1, series.J1_NEAR, series.P1_FAR, series.Q1_FAR)


def _second_kind(x: Term, inside: Term, beyond: Term) -> Term:
    """A function of the second kind: -∞ at 0 and NaN below."""
    result = where(x <= BESSEL_NEAR, inside, beyond)
    return where(isnan(x), x, where(x < 0, math.nan, where(eq(x, 0), -math.inf, result)))


def _between(x: Term) -> Term:
    """x clamped to (0, 8]."""
    return minimum(maximum(x, 1e-300), BESSEL_NEAR)


@_in_double(aten.special_bessel_y0.default)
def y0(x: Term) -> Term:
    """Y₀(x)."""
    small = _between(x)
    square = small * small
    first = clenshaw(series.J0_NEAR, square, 0, BESSEL_NEAR * BESSEL_NEAR)
    inside = clenshaw(series.Y0_NEAR, square, 0, BESSEL_NEAR * BESSEL_NEAR) + 2 / math.pi * log(small) * first
    beyond = _far(maximum(x, BESSEL_NEAR), 0, series.P0_FAR, series.Q0_FAR, second=True)
    return _second_kind(x, inside, beyond)


@_in_double(aten.special_bessel_y1.default)
def y1(x: Term) -> Term:
    """Y₁(x)."""
    small = _between(x)
    square = small * small
    first = clenshaw(series.J1_NEAR, square, 0, BESSEL_NEAR * BESSEL_NEAR) * small
    regular = clenshaw(series.Y1_NEAR, square, 0, BESSEL_NEAR * BESSEL_NEAR) * small
    inside = regular + 2 / math.pi * (log(small) * first - 1 / small)
    beyond = _far(maximum(x, BESSEL_NEAR), 1, series.P1_FAR, series.Q1_FAR, second=True)
    return _second_kind(x, inside, beyond)


@_in_double(aten.special_airy_ai.default)
def airy(x: Term) -> Term:
    """Ai(x): decays above 0, oscillates below; NaN at -∞, 0 at +∞."""
    size = minimum(maximum(absolute(x), AIRY_NEAR), 1e300)
    zeta = size * sqrt(size) * (2 / 3)
    inverse, root = 1 / zeta, sqrt(sqrt(size))
    middle = clenshaw(series.AIRY_NEAR, minimum(maximum(x, -AIRY_NEAR), AIRY_NEAR), -AIRY_NEAR, AIRY_NEAR)
    decay = clenshaw(series.AIRY_ABOVE, inverse, 0, AIRY_TOP) * exp(-zeta) / (2 * math.sqrt(math.pi) * root)
    phase = zeta + math.pi / 4
    wave = clenshaw(series.AIRY_SINE, inverse, 0, AIRY_TOP) * call("sin", phase)
    wave = wave - clenshaw(series.AIRY_COSINE, inverse, 0, AIRY_TOP) * call("cos", phase)
    wave = wave / (math.sqrt(math.pi) * root)
    result = where(x > AIRY_NEAR, decay, where(x < -AIRY_NEAR, wave, middle))
    return where(isnan(x) | eq(x, -math.inf), math.nan, result)
