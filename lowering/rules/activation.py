"""Lowers activation functions and their gradients: one formula each.

Tensor arguments become terms under PyTorch's promotion; numbers are passed to the formula unchanged.  Gradients take
the incoming gradient first, as in ATen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch._ops import OpOverload

from fusion.lowering.builder import Builder
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import (
    Term,
    clamp,
    erf,
    exp,
    expm1,
    log,
    log1p,
    maximum,
    sigmoid,
    tanh,
    where,
)
from fusion.lowering.rules.promotion import Kind, compose
from fusion.lowering.value import Value

aten = torch.ops.aten

Formula: TypeAlias = Callable[..., Term]

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_SQRT_1_OVER_2PI = math.sqrt(0.5 / math.pi)


def formula(target: OpOverload, kind: Kind = Kind.DEFAULT) -> Callable[[Formula], Formula]:
    """Register the decorated formula as the rule of `target`."""

    def register(build: Formula) -> Formula:
        @lowers(target)
        def rule(ctx: Builder, *args: object, **kwargs: object) -> Value:
            tensors = [arg for arg in args if isinstance(arg, Value)]

            def applied(*terms: Term) -> Term:
                rest = iter(terms)
                return build(*(next(rest) if isinstance(arg, Value) else arg for arg in args), **kwargs)

            return compose(applied, *tensors, kind=kind)

        return build

    return register


# Forward ------------------------------------------------------------------------------------------------------------


@formula(aten.relu.default)
def relu(x: Term) -> Term:
    """max(0, x); keeps -0.0."""
    return maximum(0, x)


@formula(aten.leaky_relu.default)
def leaky_relu(x: Term, negative_slope: float = 0.01) -> Term:
    """x, with another slope below 0."""
    return where(x > 0, x, x * negative_slope)


@formula(aten._prelu_kernel.default)
def prelu(x: Term, weight: Term) -> Term:
    """Leaky relu with learned slopes."""
    return where(x > 0, x, weight * x)


@formula(aten.hardtanh.default)
def hardtanh(x: Term, min_val: float = -1.0, max_val: float = 1.0) -> Term:
    """x clamped to two bounds."""
    return clamp(x, min_val, max_val)


@formula(aten.threshold.default)
def threshold(x: Term, threshold: float, value: float) -> Term:
    """x where it exceeds the threshold, else `value`."""
    return where(x <= threshold, value, x)


@formula(aten.hardshrink.default)
def hardshrink(x: Term, lambd: float = 0.5) -> Term:
    """x, with 0 for |x| ≤ lambd."""
    return where((x >= -lambd) & (x <= lambd), 0.0, x)


@formula(aten.softshrink.default)
def softshrink(x: Term, lambd: float = 0.5) -> Term:
    """x moved towards 0 by lambd; NaN stays."""
    return where(x > lambd, x - lambd, where(x < -lambd, x + lambd, x * 0.0))


@formula(aten.hardsigmoid.default)
def hardsigmoid(x: Term) -> Term:
    """A piecewise linear sigmoid."""
    return clamp(x + 3, 0, 6) / 6


@formula(aten.hardswish.default)
def hardswish(x: Term) -> Term:
    """x·hardsigmoid(x)."""
    return x * clamp(x + 3, 0, 6) / 6


formula(aten.sigmoid.default, Kind.INT_TO_FLOAT)(sigmoid)


@formula(aten.silu.default)
def silu(x: Term) -> Term:
    """x·sigmoid(x)."""
    return x / (1 + exp(-x))


@formula(aten.mish.default)
def mish(x: Term) -> Term:
    """x·tanh(softplus(x))."""
    return x * tanh(log1p(exp(x)))


@formula(aten.softplus.default)
def softplus(x: Term, beta: float = 1, threshold: float = 20) -> Term:
    """log(1 + exp(beta·x)) / beta, taken as x beyond the threshold."""
    scaled = x * beta
    return where(scaled > threshold, x, log1p(exp(scaled)) / beta)


@formula(aten.elu.default)
def elu(x: Term, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Term:
    """scale·x above 0, scale·alpha·(exp(input_scale·x) - 1) below."""
    return where(x > 0, x * scale, expm1(x * input_scale) * (alpha * scale))


@formula(aten.celu.default)
def celu(x: Term, alpha: float = 1.0) -> Term:
    """x above 0, alpha·(exp(x / alpha) - 1) below."""
    return where(x > 0, x, expm1(x * (1 / alpha)) * alpha)


@formula(aten.gelu.default)
def gelu(x: Term, *, approximate: str = "none") -> Term:
    """x·Φ(x), Φ the normal distribution function, exact or by tanh (Hendrycks & Gimpel 2016)."""
    if approximate == "tanh":
        return 0.5 * x * (1 + tanh(_gelu_inner(x)))
    return x * 0.5 * (1 + erf(x * _SQRT_HALF))


def _gelu_inner(x: Term) -> Term:
    return _SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x))


@formula(aten.logit.default, Kind.INT_TO_FLOAT)
def logit(x: Term, eps: float | None = None) -> Term:
    """log(x / (1 - x)), with x first clamped to [eps, 1 - eps] if eps is given."""
    if eps is not None:
        x = clamp(x, eps, 1 - eps)
    return log(x / (1 - x))


# Gradients ----------------------------------------------------------------------------------------------------------


@formula(aten.threshold_backward.default)
def threshold_backward(grad: Term, x: Term, threshold: float) -> Term:
    """The gradient of threshold and relu."""
    return where(x <= threshold, 0, grad)


@formula(aten.leaky_relu_backward.default)
def leaky_relu_backward(grad: Term, x: Term, negative_slope: float, self_is_result: bool) -> Term:
    """The gradient of leaky_relu."""
    return where(x > 0, grad, grad * negative_slope)


@formula(aten.hardtanh_backward.default)
def hardtanh_backward(grad: Term, x: Term, min_val: float, max_val: float) -> Term:
    """The gradient of hardtanh."""
    return where((x <= min_val) | (x >= max_val), 0.0, grad)


@formula(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(grad: Term, x: Term) -> Term:
    """The gradient of hardsigmoid."""
    return where((x > -3.0) & (x < 3.0), grad * (1 / 6), 0.0)


@formula(aten.hardswish_backward.default)
def hardswish_backward(grad: Term, x: Term) -> Term:
    """The gradient of hardswish."""
    return where(x <= -3.0, 0.0, where(x < 3.0, grad * (x / 3.0 + 0.5), grad))


@formula(aten.sigmoid_backward.default)
def sigmoid_backward(grad: Term, y: Term) -> Term:
    """The gradient of y = sigmoid(x)."""
    return grad * (1 - y) * y


@formula(aten.tanh_backward.default)
def tanh_backward(grad: Term, y: Term) -> Term:
    """The gradient of y = tanh(x)."""
    return grad * (1 - y * y)


@formula(aten.silu_backward.default)
def silu_backward(grad: Term, x: Term) -> Term:
    """The gradient of silu."""
    s = sigmoid(x)
    return grad * s * (1 + x * (1 - s))


@formula(aten.mish_backward.default)
def mish_backward(grad: Term, x: Term) -> Term:
    """The gradient of mish."""
    t = tanh(log1p(exp(x)))
    return grad * (t + x * sigmoid(x) * (1 - t * t))


@formula(aten.softplus_backward.default)
def softplus_backward(grad: Term, x: Term, beta: float, threshold: float) -> Term:
    """The gradient of softplus."""
    scaled = x * beta
    z = exp(scaled)
    return where(scaled > threshold, grad, grad * z / (z + 1))


@formula(aten.elu_backward.default)
def elu_backward(
    grad: Term, alpha: float, scale: float, input_scale: float, is_result: bool, self_or_result: Term
) -> Term:
    """The gradient of elu, from its input or from its result."""
    y = self_or_result
    if is_result:
        return where(y <= 0, grad * input_scale * (y + alpha * scale), grad * scale)
    return where(y <= 0, grad * (input_scale * alpha * scale) * exp(y * input_scale), grad * scale)


@formula(aten.gelu_backward.default)
def gelu_backward(grad: Term, x: Term, *, approximate: str = "none") -> Term:
    """The gradient of gelu."""
    if approximate == "tanh":
        t = tanh(_gelu_inner(x))
        inner = _SQRT_2_OVER_PI * (1 + 3 * 0.044715 * (x * x))
        return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)
    cdf = 0.5 * (1 + erf(x * _SQRT_HALF))
    pdf = exp(x * x * -0.5) * _SQRT_1_OVER_2PI
    return grad * (cdf + x * pdf)


@formula(aten.logit_backward.default)
def logit_backward(grad: Term, x: Term, eps: float | None = None) -> Term:
    """The gradient of logit: 0 (NaN if no eps is given) outside the clamped range."""
    low, high, outside = (0.0, 1.0, math.nan) if eps is None else (eps, 1.0 - eps, 0.0)
    return where((x < low) | (x > high), outside, grad / (x * (1 - x)))


@formula(aten.hardshrink_backward.default)
@formula(aten.softshrink_backward.default)
def shrink_backward(grad: Term, x: Term, lambd: float) -> Term:
    """The gradient of hardshrink and of softshrink."""
    return where((x >= -lambd) & (x <= lambd), 0.0, grad)
