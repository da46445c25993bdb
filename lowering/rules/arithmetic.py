"""Lowers arithmetic with extra arguments: products, divisions, powers, bounds, selection, repairs of special values.

Integers to a fixed negative power are refused: eager rejects them.
"""

from __future__ import annotations

import math

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.checks.checked import divisor
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE
from fusion.lowering.ir.scalar_ops import ScalarName
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import (
    Term,
    absolute,
    call,
    eq,
    exp,
    isinf,
    isnan,
    literal,
    log1p,
    maximum,
    minimum,
    sqrt,
)
from fusion.lowering.rules.formula import where as select
from fusion.lowering.rules.promotion import (
    Argument,
    Kind,
    common_place,
    compose,
    convert,
    overloads,
    pointwise,
    promote,
    term_of,
    widened,
)
from fusion.lowering.value import Value, reshape

aten = torch.ops.aten

# Sums and products --------------------------------------------------------------------------------------------------


def _scaled(alpha: Argument, term: Term) -> Term:
    assert not isinstance(alpha, Value)
    return term if alpha == 1 else alpha * term


@lowers(aten.addcmul.default)
def addcmul(ctx: Builder, x: Value, a: Value, b: Value, *, value: Argument = 1) -> Value:
    """x + value·a·b."""
    return compose(lambda s, p, q: s + _scaled(value, p) * q, x, a, b)


@lowers(aten.addcdiv.default)
def addcdiv(ctx: Builder, x: Value, a: Value, b: Value, *, value: Argument = 1) -> Value:
    """x + value·a/b; floats only, as in eager."""
    return compose(lambda s, p, q: s + _scaled(value, p) / q, x, a, b)


@lowers(aten.addr.default)
def addr(ctx: Builder, x: Value, column: Value, row: Value, *, beta: Argument = 1, alpha: Argument = 1) -> Value:
    """beta·x + alpha·(column ⊗ row); an x with beta = 0 is not read."""
    vertical = reshape(column, (*column.shape, ONE))
    if beta == 0:
        return compose(lambda c, r: _scaled(alpha, c) * r, vertical, row)
    return compose(lambda s, c, r: _scaled(beta, s) + _scaled(alpha, c) * r, x, vertical, row)


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(ctx: Builder, start: Value, end: Value, weight: Argument) -> Value:
    """start + weight·(end - start), exact at both ends."""

    def formula(a: Term, b: Term, w: Term) -> Term:
        return select(absolute(w) < 0.5, a + w * (b - a), b - (b - a) * (1 - w))

    return compose(formula, start, end, weight)


@lowers(aten.square.default)
def square(ctx: Builder, x: Value) -> Value:
    """x²; a bool becomes an integer."""
    return compose(lambda a: a * a, x, kind=Kind.BOOL_TO_LONG)


# Division -----------------------------------------------------------------------------------------------------------


@lowers(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def div(ctx: Builder, a: Argument, b: Argument) -> Value:
    """a / b; integers become floats.  Eager multiplies by the inverse of a number on a GPU."""
    on_gpu = isinstance(a, Value) and a.device.type == "cuda"
    if ctx.wanted.rounded and on_gpu and isinstance(b, (int, float)) and b != 0:
        compute, _ = promote((a, b), Kind.INT_TO_FLOAT)
        divisor = torch.tensor(b, dtype=compute, device="cpu")
        return pointwise("mul", a, divisor.reciprocal().item(), kind=Kind.INT_TO_FLOAT)
    return pointwise("truediv", a, b, kind=Kind.INT_TO_FLOAT)


_QUOTIENTS: dict[str, ScalarName] = {"trunc": "truncdiv", "floor": "floordiv"}


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(ctx: Builder, a: Argument, b: Argument, *, rounding_mode: str | None) -> Value:
    """a / b rounded towards zero ("trunc"), down ("floor") or not (None)."""
    if rounding_mode is None:
        return div(ctx, a, b)
    return _rounded_quotient(_QUOTIENTS[rounding_mode], a, b)


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(ctx: Builder, a: Argument, b: Argument) -> Value:
    """a / b rounded down."""
    return _rounded_quotient("floordiv", a, b)


def _rounded_quotient(name: ScalarName, a: Argument, b: Argument) -> Value:
    if promote((a, b), Kind.DEFAULT)[1] is torch.bool:
        raise Unsupported("rounded division of bools")
    return _divided(name, a, b)


@lowers(*overloads(aten.remainder))
def remainder(ctx: Builder, a: Argument, b: Argument) -> Value:
    """The remainder of a divided by b, with the sign of b."""
    return _divided("remainder", a, b)


@lowers(*overloads(aten.fmod))
def fmod(ctx: Builder, a: Argument, b: Argument) -> Value:
    """The remainder of a divided by b, with the sign of a."""
    return _divided("fmod", a, b)


def _divided(name: ScalarName, a: Argument, b: Argument) -> Value:
    """A division of two numbers; on a CPU, eager refuses to divide integers by zero."""
    compute, _ = promote((a, b), Kind.DEFAULT)
    _, device = common_place((a, b))
    if compute.is_floating_point or device.type != "cpu":
        return pointwise(name, a, b)
    if isinstance(b, Value):
        return compose(lambda x, y: call(name, x, Term(divisor(y.expr))), a, b)
    if b == 0:
        raise Unsupported("integers divided by zero")
    return pointwise(name, a, b)


@lowers(aten.ldexp.Tensor)
def ldexp(ctx: Builder, a: Value, b: Value) -> Value:
    """a·2ᵇ."""
    return compose(lambda x, y: x * call("exp2", y), a, b, kind=Kind.INT_TO_FLOAT)


@lowers(aten.reciprocal.default)
def reciprocal(ctx: Builder, x: Value) -> Value:
    """1 / x."""
    return compose(lambda a: 1 / a, x, kind=Kind.INT_TO_FLOAT)


@lowers(aten.frac.default)
def frac(ctx: Builder, x: Value) -> Value:
    """The fractional part of x, with the sign of x."""
    return compose(lambda a: a - call("trunc", a), x)


# Powers -------------------------------------------------------------------------------------------------------------


@lowers(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: Builder, x: Value, exponent: Argument) -> Value:
    """x to a fixed power; powers that eager's kernels expand into products are expanded the same way."""
    if isinstance(exponent, sympy.Expr):
        if not exponent.is_Integer:
            raise Unsupported("power with a symbolic exponent")
        exponent = int(exponent)
    assert not isinstance(exponent, Value)
    compute, _ = promote((x, exponent), Kind.BOOL_TO_LONG)
    power = exponent
    if not compute.is_floating_point and (power < 0 or power > 64):
        raise Unsupported(f"integers to the power of {power}")

    def formula(a: Term, _: Term) -> Term:
        return _power(a, power)

    return compose(formula, x, exponent, kind=Kind.BOOL_TO_LONG)


def _power(a: Term, power: float) -> Term:
    if power == 0:
        return Term(literal(1, a.dtype))
    if not a.dtype.is_floating_point:
        return _integer_power(a, int(power))
    expanded = {0.5: sqrt, 1: _same, 2: _squared, 3: _cubed, -0.5: _rsqrt, -1: _inverse, -2: _inverse_square}
    if power in expanded:
        return expanded[power](a)
    return call("pow", a, power)


def _same(a: Term) -> Term:
    return a


def _squared(a: Term) -> Term:
    return a * a


def _cubed(a: Term) -> Term:
    return a * a * a


def _rsqrt(a: Term) -> Term:
    return call("rsqrt", a)


def _inverse(a: Term) -> Term:
    return 1 / a


def _inverse_square(a: Term) -> Term:
    return 1 / (a * a)


def _integer_power(a: Term, power: int) -> Term:
    """An integer power by repeated squaring; wraps as eager's integers do."""
    result: Term | None = None
    while power:
        if power & 1:
            result = a if result is None else result * a
        power >>= 1
        if power:
            a = a * a
    assert result is not None
    return result


@lowers(aten.pow.Scalar)
def pow_of_scalar(ctx: Builder, base: Argument, x: Value) -> Value:
    """A fixed base to the power of x."""
    if base == 2 and x.dtype.is_floating_point:
        return pointwise("exp2", x)
    return pow_tensor(ctx, base, x)


@lowers(aten.pow.Tensor_Tensor)
def pow_tensor(ctx: Builder, base: Argument, exponent: Argument) -> Value:
    """base to the power of exponent, element by element; a negative power of an integer is 0 but for 1 and -1."""
    return pointwise("pow", base, exponent, kind=Kind.BOOL_TO_LONG)


# Bounds and selection -----------------------------------------------------------------------------------------------


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(ctx: Builder, x: Value, min: Argument | None = None, max: Argument | None = None) -> Value:
    """x clamped to two bounds, either of which may be missing; NaN and -0.0 stay."""

    def formula(a: Term, *bounds: Term) -> Term:
        rest = list(bounds)
        if min is not None:
            a = maximum(rest.pop(0), a)
        return minimum(rest.pop(0), a) if max is not None else a

    return compose(formula, x, *(bound for bound in (min, max) if bound is not None))


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(ctx: Builder, x: Value, min: Argument) -> Value:
    """The larger of x and the bound."""
    return pointwise("maximum", min, x)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(ctx: Builder, x: Value, max: Argument) -> Value:
    """The smaller of x and the bound."""
    return pointwise("minimum", max, x)


@lowers(aten.fmax.default)
def fmax(ctx: Builder, a: Value, b: Value) -> Value:
    """The larger operand; a NaN loses against a number."""
    return compose(lambda x, y: select(isnan(x), y, select(isnan(y), x, maximum(x, y))), a, b)


@lowers(aten.fmin.default)
def fmin(ctx: Builder, a: Value, b: Value) -> Value:
    """The smaller operand; a NaN loses against a number."""
    return compose(lambda x, y: select(isnan(x), y, select(isnan(y), x, minimum(x, y))), a, b)


@lowers(aten.where.self, aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf)
def where(ctx: Builder, condition: Value, a: Argument, b: Argument) -> Value:
    """a where the condition holds, else b."""
    if condition.dtype not in (torch.bool, torch.uint8):
        raise Unsupported(f"a condition of {condition.dtype}")
    compute, result = promote((a, b), Kind.DEFAULT)
    shape, device = common_place((condition, a, b))
    test = term_of(condition, shape, torch.bool)
    chosen = select(test, term_of(a, shape, compute), term_of(b, shape, compute))
    return Value(shape, result, device, chosen.to(result, implicit=True).expr)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: Builder, x: Value, mask: Value, value: Argument) -> Value:
    """x, with `value` (a number or a 0-d tensor, converted to x's dtype) where the mask holds."""
    if mask.dtype is not torch.bool:
        raise Unsupported(f"a mask of {mask.dtype}")
    shape, device = common_place((x, mask))
    compute = widened(x.dtype)
    filler = term_of(convert(value, x.dtype) if isinstance(value, Value) else value, shape, compute)
    chosen = select(term_of(mask, shape, torch.bool), filler, term_of(x, shape, compute))
    return Value(shape, x.dtype, device, chosen.to(x.dtype, implicit=True).expr)


# Special values and signs -------------------------------------------------------------------------------------------


@lowers(aten.nan_to_num.default)
def nan_to_num(
    ctx: Builder, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    """x with NaN and the infinities replaced: by 0 and the extreme finite numbers of its dtype unless given."""
    if not x.dtype.is_floating_point:
        return x
    info = torch.finfo(x.dtype)
    high = info.max if posinf is None else posinf
    low = info.min if neginf is None else neginf

    def formula(a: Term) -> Term:
        finite = select(eq(a, math.inf), high, select(eq(a, -math.inf), low, a))
        return select(isnan(a), 0.0 if nan is None else nan, finite)

    return compose(formula, x)


@lowers(aten.signbit.default)
def signbit(ctx: Builder, x: Value) -> Value:
    """Whether the sign is negative: true for -0.0; NaN counts as positive, whatever its sign bit."""
    if x.dtype is torch.bool:
        raise Unsupported("signbit of bools")
    return compose(_negative, x, kind=Kind.ALWAYS_BOOL)


def _negative(a: Term) -> Term:
    if not a.dtype.is_floating_point:
        return a < 0
    return (a < 0) | (eq(a, 0) & (1 / a < 0))


@lowers(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(ctx: Builder, a: Value, b: Argument) -> Value:
    """|a| with the sign of b; NaN counts as positive, whatever its sign bit."""
    return compose(lambda x, y: select(_negative(y), -absolute(x), absolute(x)), a, b, kind=Kind.INT_TO_FLOAT)


@lowers(aten.hypot.default)
def hypot(ctx: Builder, a: Value, b: Value) -> Value:
    """sqrt(a² + b²) without overflow: scaled by the larger operand; infinite if either is, even if the other is NaN."""

    def formula(x: Term, y: Term) -> Term:
        large, small = maximum(absolute(x), absolute(y)), minimum(absolute(x), absolute(y))
        ratio = small / large
        length = select(eq(large, 0), large, large * sqrt(1 + ratio * ratio))
        return select(isinf(x) | isinf(y), math.inf, length)

    return compose(formula, a, b)


@lowers(aten.logaddexp.default)
def logaddexp(ctx: Builder, a: Value, b: Value) -> Value:
    """log(exp(a) + exp(b)) without overflow."""

    def formula(x: Term, y: Term) -> Term:
        return select(isinf(x) & eq(x, y), x, maximum(x, y) + log1p(exp(-absolute(x - y))))

    return compose(formula, a, b)


@lowers(aten.sinc.default)
def sinc(ctx: Builder, x: Value) -> Value:
    """sin(πx) / (πx), 1 at 0."""

    def formula(a: Term) -> Term:
        return select(eq(a, 0), 1, call("sin", math.pi * a) / (math.pi * a))

    return compose(formula, x, kind=Kind.INT_TO_FLOAT)


@lowers(aten.angle.default)
def angle(ctx: Builder, x: Value) -> Value:
    """The argument of a real number: π below 0, 0 else, NaN for NaN."""
    return compose(lambda a: select(isnan(a), a, select(a < 0, math.pi, a * 0)), x, kind=Kind.INT_TO_FLOAT)
