"""Lowers random tensors to counter-based numbers, one seed per call drawn from the device's default generator.

Same distributions as eager, other numbers; the same numbers again under the same `torch.manual_seed`.  The counter of
an element is its position in row-major order.  A generator of the caller's own is refused, as are distributions that
eager draws by rejection, and parameters that eager refuses: the call then raises its error.
"""

from __future__ import annotations

import math

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.expr import Expr, Random
from fusion.lowering.ir.requirements import Requirement
from fusion.lowering.ir.scalar_ops import Distribution
from fusion.lowering.registry import lowers
from fusion.lowering.rules.creation import filled
from fusion.lowering.rules.formula import Term, call, exp, literal, log1p, maximum, minimum, sqrt, where
from fusion.lowering.rules.promotion import Argument, compose, requiring, term_of, widened
from fusion.lowering.rules.view import result_shape
from fusion.lowering.value import Shape, Value, axes_of, contiguous_strides

aten = torch.ops.aten

DIGITS = {torch.float16: 11, torch.bfloat16: 8}
"""Binary digits of a number in [0, 1), as eager draws them: 16-bit floats are truncated, so that 1 never occurs."""


def draw(kind: Distribution, seed: Expr, shape: Shape, part: int = 0, parts: int = 1) -> Term:
    """A float32 number for each element of `shape`: the `part`-th of `parts` independent ones under `seed`."""
    position = sympy.Add(*(i * s for i, s in zip(axes_of(shape), contiguous_strides(shape), strict=True)))
    return Term(Random(kind, seed, position * parts + part))


def uniform_term(seed: Expr, shape: Shape, dtype: torch.dtype, part: int = 0, parts: int = 1) -> Term:
    """Uniform in [0, 1) with as many digits as `dtype` has, in the dtype that it is computed in."""
    if dtype is torch.float64:  # 48 digits, from two numbers
        high, low = (draw("uniform", seed, shape, 2 * part + k, 2 * parts).to(dtype) for k in (0, 1))
        return high + low * 2.0**-24
    number = draw("uniform", seed, shape, part, parts)
    if dtype in DIGITS:
        return call("floor", number * 2.0 ** DIGITS[dtype]) * 2.0 ** -DIGITS[dtype]
    return number


def normal_term(seed: Expr, shape: Shape, dtype: torch.dtype) -> Term:
    """Standard normal, in the dtype that `dtype` is computed in."""
    if dtype is torch.float64:  # Box-Muller
        radius = sqrt(-2.0 * log1p(-uniform_term(seed, shape, dtype, 0, 2)))
        return radius * call("cos", 2 * math.pi * uniform_term(seed, shape, dtype, 1, 2))
    return draw("normal", seed, shape)


def _fresh(ctx: Builder, generator: object) -> tuple[Expr, Shape, torch.dtype]:
    """(a seed, shape and dtype of the call being lowered)."""
    if generator is not None:
        raise Unsupported("a generator of the caller's own")
    meta = ctx.current.meta["val"]
    return ctx.seed(meta.device).expr, result_shape(ctx), meta.dtype


def _rounded(ctx: Builder, term: Term, dtype: torch.dtype) -> Value:
    return filled(ctx, term.to(dtype, implicit=True).expr)


# Uniform ------------------------------------------------------------------------------------------------------------


@lowers(aten.rand.default, aten.rand_like.default)
def rand(ctx: Builder, like: object, **options: object) -> Value:
    """Uniform in [0, 1)."""
    seed, shape, dtype = _fresh(ctx, None)
    return _rounded(ctx, uniform_term(seed, shape, dtype), dtype)


@lowers(aten.uniform.default)
def uniform(ctx: Builder, x: Value, low: float = 0.0, high: float = 1.0, *, generator: object = None) -> Value:
    """Uniform in [low, high)."""
    seed, shape, dtype = _fresh(ctx, generator)
    if not 0 <= high - low <= torch.finfo(dtype).max:
        raise Unsupported(f"numbers from {low} to {high}")
    number = uniform_term(seed, shape, dtype) * (high - low) + low
    return _rounded(ctx, minimum(number, max(_below(high, dtype), low)), dtype)


def _below(bound: float, dtype: torch.dtype) -> float:
    """Return the largest number of `dtype` below `bound`, to which draws are clamped, as rounding may exceed it."""
    nearest = torch.tensor(bound, dtype=dtype)
    if float(nearest) < bound:
        return float(nearest)
    return float(torch.nextafter(nearest, torch.tensor(-math.inf, dtype=dtype)))


# Normal -------------------------------------------------------------------------------------------------------------


@lowers(aten.randn.default, aten.randn_like.default)
def randn(ctx: Builder, like: object, **options: object) -> Value:
    """Standard normal."""
    seed, shape, dtype = _fresh(ctx, None)
    return _rounded(ctx, normal_term(seed, shape, dtype), dtype)


@lowers(aten.normal_functional.default)
def normal_like(ctx: Builder, x: Value, mean: float = 0.0, std: float = 1.0, *, generator: object = None) -> Value:
    """Normal with one mean and deviation, in the shape of x."""
    return _normal(ctx, generator, mean, std)


@lowers(aten.normal.float_float)
def normal_of(
    ctx: Builder, mean: float, std: float, size: object, *, generator: object = None, **options: object
) -> Value:
    """Normal with one mean and deviation."""
    return _normal(ctx, generator, mean, std)


def _normal(ctx: Builder, generator: object, mean: float, std: float) -> Value:
    seed, shape, dtype = _fresh(ctx, generator)
    return _rounded(ctx, normal_term(seed, shape, dtype) * std + mean, dtype)


@lowers(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def normal(ctx: Builder, mean: Argument, std: Argument = 1.0, *, generator: object = None) -> Value:
    """Normal with a mean and a deviation per element."""
    seed, shape, dtype = _fresh(ctx, generator)
    compute = widened(dtype)
    if isinstance(std, Value):
        std = requiring(Requirement.DEVIATION, lambda each: each >= 0, std)
    scaled = normal_term(seed, shape, dtype) * term_of(std, shape, compute)
    return _rounded(ctx, scaled + term_of(mean, shape, compute), dtype)


# By inversion ------------------------------------------------------------------------------------------------------


@lowers(aten.exponential.default)
def exponential(ctx: Builder, x: Value, lambd: float = 1.0, *, generator: object = None) -> Value:
    """Exponential with rate `lambd`."""
    seed, shape, dtype = _fresh(ctx, generator)
    return _rounded(ctx, -log1p(-open_term(seed, shape, dtype)) / lambd, dtype)


@lowers(aten.cauchy.default)
def cauchy(ctx: Builder, x: Value, median: float = 0.0, sigma: float = 1.0, *, generator: object = None) -> Value:
    """Cauchy around `median`."""
    seed, shape, dtype = _fresh(ctx, generator)
    return _rounded(ctx, call("tan", math.pi * (open_term(seed, shape, dtype) - 0.5)) * sigma + median, dtype)


@lowers(aten.log_normal.default)
def log_normal(ctx: Builder, x: Value, mean: float = 1.0, std: float = 2.0, *, generator: object = None) -> Value:
    """exp of a normal number."""
    seed, shape, dtype = _fresh(ctx, generator)
    return _rounded(ctx, exp(normal_term(seed, shape, dtype) * std + mean), dtype)


@lowers(aten.geometric.default)
def geometric(ctx: Builder, x: Value, p: float, *, generator: object = None) -> Value:
    """The number of trials of probability p up to the first success, at least one."""
    seed, shape, dtype = _fresh(ctx, generator)
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    trials = call("ceil", log1p(-open_term(seed, shape, compute)) / math.log1p(-p))
    return filled(ctx, maximum(trials, 1).expr)


def open_term(seed: Expr, shape: Shape, dtype: torch.dtype) -> Term:
    """Uniform in the open interval (0, 1), in the dtype that `dtype` is computed in."""
    compute = widened(dtype)
    return uniform_term(seed, shape, compute) * (1 - 2.0**-23) + 2.0**-24


@lowers(aten.randint.default, aten.randint.low, aten.randint_like.default, aten.randint_like.low_dtype)
def randint(ctx: Builder, *args: object, **options: object) -> Value:
    """Integers from `low` (or 0) up to, and without, `high`: 48 uniform bits modulo their number."""
    bounds = [arg for arg in args if isinstance(arg, int)]
    if len(bounds) != sum(not isinstance(arg, (Value, list)) for arg in args):
        raise Unsupported("random integers between symbolic bounds")
    low, high = bounds if len(bounds) > 1 else (0, *bounds)
    if not 0 < high - low <= 2**32:
        raise Unsupported("random integers from a range of none, or of more than 32 bits")
    seed, shape, _ = _fresh(ctx, options.get("generator"))
    first, second = ((draw("uniform", seed, shape, k, 2) * 2.0**24).to(torch.int64) for k in (0, 1))
    return filled(ctx, (call("remainder", first * 2**24 + second, high - low) + low).expr)


@lowers(aten.rrelu_with_noise_functional.default)
def rrelu(
    ctx: Builder,
    x: Value,
    noise: Value,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: object = None,
) -> tuple[Value, ...]:
    """(x with negative elements scaled by a random slope, or in evaluation by the mean one; the slopes)."""
    if not training:
        return compose(lambda a: where(a > 0, a, a * ((lower + upper) / 2)), x), noise
    if generator is not None:
        raise Unsupported("a generator of the caller's own")
    drawn = uniform_term(ctx.seed(x.device).expr, x.shape, x.dtype) * (upper - lower) + lower
    slope = where(Term(x.expr).to(drawn.dtype) <= 0, drawn, 1.0).to(x.dtype)
    slopes = ctx.map(Value(x.shape, x.dtype, x.device, slope.expr))
    return compose(lambda a, s: a * s, x, slopes), slopes


# Bernoulli ------------------------------------------------------------------------------------------------------------


@lowers(aten.bernoulli.p, aten.bernoulli.Tensor)
def bernoulli_p(ctx: Builder, x: Value, p: Argument = 0.5, *, generator: object = None) -> Value:
    """1 with probability p, else 0, in the shape and dtype of x."""
    _refuse_improbable(p)
    seed, shape, _ = _fresh(ctx, generator)
    if isinstance(p, Value):
        p = requiring(Requirement.PROBABILITY, lambda each: (each >= 0) & (each <= 1), p)
    return filled(ctx, _coin(seed, shape, p).expr)


@lowers(aten.bernoulli.default)
def bernoulli(ctx: Builder, p: Value, *, generator: object = None) -> Value:
    """1 with the probability that the element holds, else 0."""
    if not p.dtype.is_floating_point:
        raise Unsupported(f"probabilities of {p.dtype}")
    return bernoulli_p(ctx, p, p, generator=generator)


def _refuse_improbable(p: Argument) -> None:
    if isinstance(p, (int, float)) and not 0 <= p <= 1:
        raise Unsupported(f"a probability of {p}")


def _coin(seed: Expr, shape: Shape, p: Argument) -> Term:
    return draw("uniform", seed, shape) < term_of(p, shape, torch.float32)


@lowers(aten.native_dropout.default)
def dropout(ctx: Builder, x: Value, p: float, train: bool | None) -> tuple[Value, ...]:
    """(x with elements dropped with probability p and the rest scaled up, which were kept)."""
    if train is False:
        return x, Value(x.shape, torch.bool, x.device, literal(True, torch.bool))
    _refuse_improbable(p)
    kept = _coin(ctx.seed(x.device).expr, x.shape, 1 - p)
    compute = widened(x.dtype)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    out = (Term(x.expr).to(compute) * kept.to(compute) * scale).to(x.dtype, implicit=True)
    return Value(x.shape, x.dtype, x.device, out.expr), Value(x.shape, torch.bool, x.device, kept.expr)


@lowers(aten.native_dropout_backward.default)
def dropout_backward(ctx: Builder, grad: Value, mask: Value, scale: float) -> Value:
    """grad·mask·scale."""
    return compose(lambda g, m, s: g * m * s, grad, mask, scale)
