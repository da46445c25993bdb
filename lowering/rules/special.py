"""Lowers special functions to formulas over ordinary ones, accurate in the dtype they are computed in.

Chebyshev series (`series.py`) are summed by Clenshaw's recurrence.  Where a function has several forms, each element
computes all of them, on arguments clamped to the range of the form, and selects one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch._ops import OpOverload

from fusion.lowering.builder import Builder
from fusion.lowering.registry import lowers
from fusion.lowering.rules import series
from fusion.lowering.rules.formula import (
    Term,
    absolute,
    call,
    eq,
    erf,
    exp,
    isnan,
    literal,
    log,
    log1p,
    maximum,
    minimum,
    sqrt,
    where,
)
from fusion.lowering.rules.promotion import Kind, compose
from fusion.lowering.value import Value

aten = torch.ops.aten

TWO_OVER_SQRT_PI = 2 / math.sqrt(math.pi)


def special(*targets: OpOverload) -> Callable[[Callable[[Term], Term]], Callable[[Term], Term]]:
    """Register the decorated formula of one argument; integers are converted to floats."""

    def register(build: Callable[[Term], Term]) -> Callable[[Term], Term]:
        @lowers(*targets)
        def rule(ctx: Builder, x: Value) -> Value:
            return compose(build, x, kind=Kind.INT_TO_FLOAT)

        return build

    return register


def clenshaw(coefficients: Sequence[float], x: Term, low: float, high: float) -> Term:
    """Return Σ cₖ·Tₖ over [low, high] by Clenshaw's recurrence."""
    scaled = (x * 2 - (low + high)) / (high - low)
    twice, newer, older = scaled * 2, scaled * 0, scaled * 0
    for coefficient in reversed(coefficients[1:]):
        newer, older = twice * newer - older + coefficient, newer
    return scaled * newer - older + coefficients[0]


def polynomial(x: Term, coefficients: Sequence[float]) -> Term:
    """Return Σ cₖ·xᵏ by Horner's rule."""
    total: Term | None = None
    for coefficient in reversed(coefficients):
        total = Term(literal(coefficient, x.dtype)) if total is None else total * x + coefficient
    assert total is not None
    return total


# Modified Bessel functions ------------------------------------------------------------------------------------------


@special(aten.special_i0e.default)
def i0e(x: Term) -> Term:
    """exp(-|x|)·I₀(x)."""
    size = absolute(x)
    near, far = minimum(size, 8), maximum(size, 8)
    beyond = clenshaw(series.I0_FAR, 1 / far, 0, 1 / 8) / sqrt(far)
    return where(size <= 8, clenshaw(series.I0_NEAR, near, 0, 8), beyond)


@special(aten.special_i1e.default)
def i1e(x: Term) -> Term:
    """exp(-|x|)·I₁(x)."""
    size = absolute(x)
    near, far = minimum(size, 8), maximum(size, 8)
    beyond = clenshaw(series.I1_FAR, 1 / far, 0, 1 / 8) / sqrt(far)
    result = where(size <= 8, clenshaw(series.I1_NEAR, near, 0, 8) * near, beyond)
    return where(x < 0, -result, result)


@special(aten.i0.default, aten.special_modified_bessel_i0.default)
def i0(x: Term) -> Term:
    """I₀(x)."""
    return exp(absolute(x)) * i0e(x)


@special(aten.special_i1.default, aten.special_modified_bessel_i1.default)
def i1(x: Term) -> Term:
    """I₁(x)."""
    return exp(absolute(x)) * i1e(x)


def _second_kind(x: Term, near: Callable[[Term], Term], far: Sequence[float], *, scaled: bool) -> Term:
    """K of either order: infinite at 0, NaN below."""
    small, large = minimum(maximum(x, 1e-30), 2), maximum(x, 2)
    beyond = clenshaw(far, 1 / large, 0, 0.5) / sqrt(large)
    inside = near(small) * exp(small) if scaled else near(small)
    result = where(x <= 2, inside, beyond if scaled else exp(-large) * beyond)
    return where(isnan(x), x, where(x < 0, math.nan, where(eq(x, 0), math.inf, result)))


def _k0_near(x: Term) -> Term:
    return clenshaw(series.K0_NEAR, x * x, 0, 4) - log(0.5 * x) * i0(x)


def _k1_near(x: Term) -> Term:
    return clenshaw(series.K1_NEAR, x * x, 0, 4) / x + log(0.5 * x) * i1(x)


@special(aten.special_modified_bessel_k0.default)
def k0(x: Term) -> Term:
    """K₀(x)."""
    return _second_kind(x, _k0_near, series.K0_FAR, scaled=False)


@special(aten.special_modified_bessel_k1.default)
def k1(x: Term) -> Term:
    """K₁(x)."""
    return _second_kind(x, _k1_near, series.K1_FAR, scaled=False)


@special(aten.special_scaled_modified_bessel_k0.default)
def scaled_k0(x: Term) -> Term:
    """exp(x)·K₀(x)."""
    return _second_kind(x, _k0_near, series.K0_FAR, scaled=True)


@special(aten.special_scaled_modified_bessel_k1.default)
def scaled_k1(x: Term) -> Term:
    """exp(x)·K₁(x)."""
    return _second_kind(x, _k1_near, series.K1_FAR, scaled=True)


@special(aten.special_spherical_bessel_j0.default)
def spherical_j0(x: Term) -> Term:
    """sin(x) / x, by its series near 0."""
    square = x * x
    near = polynomial(square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(8)])
    inside = absolute(x) < 0.5
    beyond = where(call("isinf", x), 0.0, call("sin", x) / where(inside, 1, x))
    return where(inside, near, beyond)


# The error function's relatives -------------------------------------------------------------------------------------


@special(aten.special_erfcx.default)
def erfcx(x: Term) -> Term:
    """exp(x²)·erfc(x); below 0 by reflection."""
    size = minimum(absolute(x), 1e15)
    right = clenshaw(series.ERFCX, (size - 3.75) / (size + 3.75), -1, 1) / (1 + 2 * size)
    left = 2 * exp(x * x) - right
    return where(call("isinf", x) & (x > 0), 0.0, where(x < 0, left, right))


def _guess(y: Term, rest: Term) -> Term:
    """Return a number with erf ≈ `y` ≥ 0 and erfc ≈ `rest`, to two digits (Winitzki 2008; near 0 the series)."""
    shape = 0.147
    logarithm = log(rest * (1 + y))
    middle = 2 / (math.pi * shape) + logarithm * 0.5
    far = sqrt(maximum(sqrt(middle * middle - logarithm * (1 / shape)) - middle, 0))
    near = y / TWO_OVER_SQRT_PI * (1 + math.pi / 12 * (y * y))
    return where(y < 0.5, near, far)


def _refined(guess: Term, y: Term, rest: Term) -> Term:
    """Refine `guess` by three steps of Halley's method; in the tail the residual uses erfc, which keeps digits."""
    x = guess
    for _ in range(3):
        residual = where(y < 0.5, erf(x) - y, rest - call("erfc", x))
        step = residual / (TWO_OVER_SQRT_PI * exp(-(x * x)))
        x = x - step / (1 + x * step)
    return x


@special(aten.erfinv.default)
def erfinv(y: Term) -> Term:
    """x with erf(x) = y; infinite at ±1, NaN beyond."""
    if y.dtype is torch.float32:
        return _erfinv_by_series(y.to(torch.float64)).to(torch.float32)
    size = absolute(y)
    inside = size < 1
    clamped = where(inside, size, 0)
    positive = _refined(_guess(clamped, 1 - clamped), clamped, 1 - clamped)
    result = where(inside, positive, where(eq(size, 1), math.inf, y * 0 + math.nan))
    return where(eq(y, 0), y, where(y < 0, -result, result))  # a zero keeps its sign


def _erfinv_by_series(y: Term) -> Term:
    """Return erfinv to float32's precision: y times a polynomial of -log(1 - y²) (Giles 2012); infinite at ±1, as log.

    Even and odd powers are summed separately, for shorter chains of dependences.
    """
    scaled = log((1 - y) * (1 + y)) * (-2 / series.ERFINV_RANGE[1]) - 1
    square = scaled * scaled
    return y * (polynomial(square, series.ERFINV[::2]) + scaled * polynomial(square, series.ERFINV[1::2]))


@special(aten.special_ndtri.default)
def ndtri(p: Term) -> Term:
    """The quantile of the standard normal distribution."""
    lower = p < 0.5
    tail = 2 * where(lower, p, 1 - p)  # erfc of the result's size over √2
    inside = (tail > 0) & (tail <= 1)
    rest = where(inside, tail, 1)
    quantile = _refined(_guess(1 - rest, rest), 1 - rest, rest) * math.sqrt(2)
    result = where(inside, quantile, where(eq(tail, 0), math.inf, p * 0 + math.nan))
    return where(lower, -result, result)


# The logarithmic derivative of the gamma function --------------------------------------------------------------------

BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
"""B₂, B₄, …"""

ASYMPTOTIC = 10
"""From this argument on, the asymptotic series have all digits of float64."""


@special(aten.digamma.default)
def digamma(x: Term) -> Term:
    """ψ(x): by reflection below 0, shifted to where its asymptotic series holds; at 0 an infinity against its sign."""
    reflected = x <= 0
    start = where(reflected, 1 - x, x)
    total, at = Term(literal(0, x.dtype)), start
    for _ in range(ASYMPTOTIC):
        small = at < ASYMPTOTIC
        total = total - where(small, 1 / at, 0)
        at = at + small.to(at.dtype)
    square = 1 / (at * at)
    tail = polynomial(square, [b / (2 * k) for k, b in enumerate(BERNOULLI, 1)]) * square
    value = total + log(at) - 0.5 / at - tail
    part = x - call("round", x)
    turned = value - math.pi / call("tan", math.pi * part)
    below = where(eq(x, 0), -1 / x, where(eq(part, 0), math.nan, turned))
    return where(reflected, below, value)


@lowers(aten.special_log_ndtr.default)
def log_ndtr(ctx: Builder, x: Value) -> Value:
    """The logarithm of the standard normal distribution function, from its tail below -1."""

    def formula(a: Term) -> Term:
        scaled = a * math.sqrt(0.5)
        low = where(a < -1, scaled, -1)
        tail = log(erfcx(-low) * 0.5) - low * low
        return where(a < -1, tail, log1p(call("erfc", scaled) * -0.5))

    return compose(formula, x, kind=Kind.INT_TO_FLOAT)
