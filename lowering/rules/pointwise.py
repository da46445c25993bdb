"""Lowers pointwise operations that are one scalar operation each: rows of a table.

Type promotion and broadcasting are PyTorch's own, see `promotion.py`.  Operations with further arguments are in
`arithmetic.py`, activation functions in `activation.py`.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverloadPacket

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.scalar_ops import ScalarName
from fusion.lowering.registry import lowers
from fusion.lowering.rules import formula
from fusion.lowering.rules.formula import Term
from fusion.lowering.rules.promotion import (
    Argument,
    Kind,
    common_place,
    compose,
    overloads,
    pointwise,
    promote,
    term_of,
)
from fusion.lowering.value import Value

aten = torch.ops.aten

TABLE: tuple[tuple[OpOverloadPacket, ScalarName, Kind], ...] = (
    (aten.neg, "neg", Kind.DEFAULT),
    (aten.mul, "mul", Kind.DEFAULT),
    (aten.maximum, "maximum", Kind.DEFAULT),
    (aten.minimum, "minimum", Kind.DEFAULT),
    (aten.atan2, "atan2", Kind.INT_TO_FLOAT),
    (aten.sqrt, "sqrt", Kind.INT_TO_FLOAT),
    (aten.rsqrt, "rsqrt", Kind.INT_TO_FLOAT),
    (aten.exp, "exp", Kind.INT_TO_FLOAT),
    (aten.exp2, "exp2", Kind.INT_TO_FLOAT),
    (aten.expm1, "expm1", Kind.INT_TO_FLOAT),
    (aten.log, "log", Kind.INT_TO_FLOAT),
    (aten.log2, "log2", Kind.INT_TO_FLOAT),
    (aten.log10, "log10", Kind.INT_TO_FLOAT),
    (aten.log1p, "log1p", Kind.INT_TO_FLOAT),
    (aten.sin, "sin", Kind.INT_TO_FLOAT),
    (aten.cos, "cos", Kind.INT_TO_FLOAT),
    (aten.tan, "tan", Kind.INT_TO_FLOAT),
    (aten.asin, "asin", Kind.INT_TO_FLOAT),
    (aten.acos, "acos", Kind.INT_TO_FLOAT),
    (aten.atan, "atan", Kind.INT_TO_FLOAT),
    (aten.sinh, "sinh", Kind.INT_TO_FLOAT),
    (aten.cosh, "cosh", Kind.INT_TO_FLOAT),
    (aten.tanh, "tanh", Kind.INT_TO_FLOAT),
    (aten.asinh, "asinh", Kind.INT_TO_FLOAT),
    (aten.acosh, "acosh", Kind.INT_TO_FLOAT),
    (aten.atanh, "atanh", Kind.INT_TO_FLOAT),
    (aten.erf, "erf", Kind.INT_TO_FLOAT),
    (aten.erfc, "erfc", Kind.INT_TO_FLOAT),
    (aten.lgamma, "lgamma", Kind.INT_TO_FLOAT),
    (aten.bitwise_and, "and", Kind.DEFAULT),
    (aten.bitwise_or, "or", Kind.DEFAULT),
    (aten.bitwise_xor, "xor", Kind.DEFAULT),
    (aten.bitwise_not, "not", Kind.DEFAULT),
    (aten.bitwise_left_shift, "shl", Kind.DEFAULT),
    (aten.bitwise_right_shift, "shr", Kind.DEFAULT),
    (aten.__lshift__, "shl", Kind.DEFAULT),
    (aten.__rshift__, "shr", Kind.DEFAULT),
)
"""ATen operation, scalar operation, kind of promotion."""

BITWISE = frozenset({"and", "or", "xor", "not", "shl", "shr"})
"""The scalar operations that are undefined on floats."""

COMPARISONS: tuple[tuple[OpOverloadPacket, ScalarName], ...] = (
    (aten.eq, "eq"),
    (aten.ne, "ne"),
    (aten.lt, "lt"),
    (aten.le, "le"),
    (aten.gt, "gt"),
    (aten.ge, "ge"),
)
IDENTITY_ON_INTEGERS: tuple[tuple[OpOverloadPacket, ScalarName], ...] = (
    (aten.floor, "floor"),
    (aten.ceil, "ceil"),
    (aten.trunc, "trunc"),
    (aten.round, "round"),
)
IDENTITY_ON_BOOLS: tuple[tuple[OpOverloadPacket, ScalarName], ...] = (
    (aten.abs, "abs"),
    (aten.sign, "sign"),
    (aten.sgn, "sign"),
)
PREDICATES: tuple[OpOverloadPacket, ...] = (aten.isnan, aten.isinf)


def _register(packet: OpOverloadPacket, name: ScalarName, kind: Kind) -> None:
    @lowers(*overloads(packet))
    def rule(ctx: Builder, *args: Argument) -> Value:
        result = pointwise(name, *args, kind=kind)
        if name in BITWISE and result.dtype.is_floating_point:
            raise Unsupported("bits of floats, which are eager's to refuse")
        return result


def _register_comparison(packet: OpOverloadPacket, name: ScalarName) -> None:
    @lowers(*overloads(packet))
    def rule(ctx: Builder, *args: Argument) -> Value:
        """Compare in the operands' own dtype: a 16-bit float is rounded as the stored value it is compared with."""
        shape, device = common_place(args)
        _, common = promote(args, Kind.DEFAULT)
        terms = [term_of(arg, shape, common) for arg in args]
        return Value(shape, torch.bool, device, formula.call(name, *terms).expr)


def _register_identity(packet: OpOverloadPacket, name: ScalarName, on_integers: bool) -> None:
    @lowers(packet.default)
    def rule(ctx: Builder, x: Value) -> Value:
        is_identity = not x.dtype.is_floating_point if on_integers else x.dtype is torch.bool
        return x if is_identity else pointwise(name, x)


def _register_predicate(packet: OpOverloadPacket) -> None:
    predicate = getattr(formula, packet.__name__)

    @lowers(packet.default)
    def rule(ctx: Builder, x: Value) -> Value:
        return compose(predicate, x, kind=Kind.ALWAYS_BOOL)


for _packet, _name, _kind in TABLE:
    _register(_packet, _name, _kind)
for _packet, _name in COMPARISONS:
    _register_comparison(_packet, _name)
for _packet, _name in IDENTITY_ON_INTEGERS:
    _register_identity(_packet, _name, on_integers=True)
for _packet, _name in IDENTITY_ON_BOOLS:
    _register_identity(_packet, _name, on_integers=False)
for _packet in PREDICATES:
    _register_predicate(_packet)


@lowers(aten.logical_and.default)
def logical_and(ctx: Builder, a: Value, b: Value) -> Value:
    """Both are non-zero."""
    return compose(lambda x, y: x.to(torch.bool) & y.to(torch.bool), a, b, kind=Kind.ALWAYS_BOOL)


@lowers(aten.logical_or.default)
def logical_or(ctx: Builder, a: Value, b: Value) -> Value:
    """Either is non-zero."""
    return compose(lambda x, y: x.to(torch.bool) | y.to(torch.bool), a, b, kind=Kind.ALWAYS_BOOL)


@lowers(aten.logical_xor.default)
def logical_xor(ctx: Builder, a: Value, b: Value) -> Value:
    """Exactly one is non-zero."""
    return compose(lambda x, y: formula.ne(x.to(torch.bool), y.to(torch.bool)), a, b, kind=Kind.ALWAYS_BOOL)


@lowers(aten.logical_not.default)
def logical_not(ctx: Builder, x: Value) -> Value:
    """x is zero."""
    return compose(lambda a: ~a.to(torch.bool), x, kind=Kind.ALWAYS_BOOL)


@lowers(aten.round.decimals)
def round_decimals(ctx: Builder, x: Value, *, decimals: int) -> Value:
    """x rounded, half to even, at `decimals` digits after (negative: before) the point."""
    if not x.dtype.is_floating_point:
        raise Unsupported("rounding integers to decimals")
    scale = 10.0 ** abs(decimals)

    def rounded(a: Term) -> Term:
        if decimals == 0:
            return formula.call("round", a)
        if decimals > 0:
            return formula.call("round", a * scale) / scale
        return formula.call("round", a / scale) * scale

    return compose(rounded, x)
