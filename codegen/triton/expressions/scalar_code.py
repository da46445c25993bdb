"""Writes one scalar operation, cast or constant of the IR as Triton code.

Input: the code of the operands; output: code.  `EMITTERS` has a row per operation of `lowering/ir/scalar_ops.py`, with
the meaning defined there: floor division floors, `maximum` propagates NaN, shifts past the width give eager's results.
Operands that are 16-bit floats are widened to float32 and the result is rounded again, as eager does.  An operation
without a row is refused by the capabilities of the target, never here.

`fast` is set where the last two bits of a float32 division, square root or exponential are invisible (`rounding`):
there the fast forms of the hardware are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from fusion.codegen.triton.expressions.code import (
    AND,
    ATOM,
    COMPARE,
    OR,
    PRODUCT,
    SHIFT,
    SUM,
    UNARY,
    XOR,
    Code,
    compose,
    listed,
    minus,
)
from fusion.lowering.ir.expr import Scalar
from fusion.lowering.ir.scalar_ops import HALVES, SCALAR_OPS, ScalarName

TYPES: dict[torch.dtype, str] = {
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}


Emitter: TypeAlias = Callable[[Sequence[Code], torch.dtype, bool], Code]
"""(operands, their dtype, fast) → code.  The dtype is never a 16-bit float: `scalar_code` has widened those."""


def literal(value: Scalar, dtype: torch.dtype) -> Code:
    """Return a constant as a Python literal, exact for `dtype`; -0.0, which Triton reads as 0.0, as a product.

    >>> literal(2.5, torch.float32).text, literal(float("-inf"), torch.float32).text, literal(True, torch.bool).text
    ('2.5', '-float("inf")', 'True')
    >>> literal(0.1, torch.bfloat16).text  # compared as float32
    '0.10009765625'
    >>> literal(-0.0, torch.float32).text
    'tl.full([], 0.0, tl.float32) * -1.0'
    """
    if dtype.is_floating_point:
        number = float(torch.tensor(value, dtype=dtype)) if dtype in HALVES else float(value)
        if math.isnan(number):
            return Code('float("nan")', number=number)
        text = 'float("inf")' if math.isinf(number) else repr(abs(number))
        negative = math.copysign(1.0, number) < 0
        if number == 0 and negative:
            return compose("tl.full([], 0.0, {}) * -1.0", TYPES[dtype], binds=PRODUCT)
    else:
        number, negative = value if dtype is torch.bool else int(value), value < 0
        text = repr(abs(number) if negative else number)
    return minus(Code(text), number) if negative else Code(text, ATOM, number)


def typed(code: Code, dtype: torch.dtype) -> Code:
    """Return `code` as a value with a type: a literal becomes a scalar of `dtype`."""
    return compose("tl.full([], {}, {})", code, TYPES[dtype]) if code.literal else code


def cast(code: Code, source: torch.dtype, target: torch.dtype) -> Code:
    """Return `code`, of dtype `source`, converted to `target` as eager does it."""
    if source is target:
        return code
    if target is torch.bool:
        zero = Code("0.0" if source.is_floating_point else "0")
        wide = cast(code, source, torch.float32) if source in HALVES else code
        return compose("{} != {}", wide.at(COMPARE + 1), zero, binds=COMPARE)
    code = typed(code, source)
    if target is torch.uint8 and source.is_floating_point:
        # Through int64, so that -1.0 wraps to 255 as it does in eager.
        return compose("{}.to(tl.int64).to(tl.uint8)", code.at(ATOM))
    if source is torch.float64 and target in HALVES:  # eager converts by way of float32, and so rounds twice
        return compose("{}.to(tl.float32).to({})", code.at(ATOM), TYPES[target])
    return compose("{}.to({})", code.at(ATOM), TYPES[target])


def scalar_code(name: ScalarName, operands: Sequence[Code], dtype: torch.dtype, fast: bool = False) -> Code:
    """Return scalar operation `name` on operands of `dtype` (`where` needs shapes: see `values`).

    >>> scalar_code("mul", [Code("a + b", SUM), Code("c")], torch.float32).text
    '(a + b) * c'
    >>> scalar_code("maximum", [Code("a"), Code("b")], torch.bfloat16).text
    '_maximum(a.to(tl.float32), b.to(tl.float32)).to(tl.bfloat16)'
    """
    if all(code.literal for code in operands):
        operands = [typed(operands[0], dtype), *operands[1:]]
    if dtype not in HALVES:
        return EMITTERS[name](operands, dtype, fast)
    wide = [code if code.literal else cast(code, dtype, torch.float32) for code in operands]
    result = EMITTERS[name](wide, torch.float32, fast)
    return result if SCALAR_OPS[name].result == "bool" else cast(result, torch.float32, dtype)


# Kinds of rows --------------------------------------------------------------------------------------------------------


def infix(sign: str, level: int) -> Emitter:
    """Return the emitter of a binary operator of Python, left-associative (comparisons are not associative)."""
    left = level + 1 if level == COMPARE else level

    def emitted(args: Sequence[Code], dtype: torch.dtype, fast: bool) -> Code:
        return listed([args[0].at(left), args[1].at(level + 1)], f" {sign} ", level)

    return emitted


def call(function: str) -> Emitter:
    """Return the emitter of a function of Triton.  It would type a literal as float32 or int32: others get a type."""
    literals_fit = function.startswith(("tl.", "libdevice.", "_maximum", "_minimum"))

    def emitted(args: Sequence[Code], dtype: torch.dtype, fast: bool) -> Code:
        if not (literals_fit and dtype in (torch.float32, torch.int32)):
            args = [typed(arg, dtype) for arg in args]
        return compose("{}({})", function, listed(args))

    return emitted


def by_kind(*, floats: Emitter, integers: Emitter, bools: Emitter | None = None) -> Emitter:
    """Return an emitter for floats and integers (and bools, where they differ from integers)."""

    def emitted(args: Sequence[Code], dtype: torch.dtype, fast: bool) -> Code:
        if dtype is torch.bool and bools is not None:
            return bools(args, dtype, fast)
        return (floats if dtype.is_floating_point else integers)(args, dtype, fast)

    return emitted


def by_width(*, single: str, double: str, quick: str | None = None) -> Emitter:
    """Return an emitter of functions for float32, float64, and for float32 where `fast` holds."""

    def emitted(args: Sequence[Code], dtype: torch.dtype, fast: bool) -> Code:
        if dtype is torch.float64:
            return call(double)(args, dtype, fast)
        return call(quick if fast and quick is not None else single)(args, dtype, fast)

    return emitted


def device(function: str) -> Emitter:
    """Return the emitter of a function of the vendor's math library."""
    return call(f"libdevice.{function}")


def unchanged(args: Sequence[Code], dtype: torch.dtype, fast: bool) -> Code:
    """Return the operand itself: an operation that does nothing to its dtype."""
    return args[0]


# Rows that depend on their operands -----------------------------------------------------------------------------------


def _power_of_two(code: Code) -> float | None:
    """Return the value of a literal that is a power of two and whose reciprocal is exact, else None."""
    if code.number is None:
        return None
    mantissa, exponent = math.frexp(code.number)
    return float(code.number) if abs(mantissa) == 0.5 and abs(exponent) < 120 else None


def _truediv(args: Sequence[Code], dtype: torch.dtype, fast: bool) -> Code:
    divisor = _power_of_two(args[1])
    if divisor is not None:
        return infix("*", PRODUCT)([args[0], literal(1.0 / divisor, dtype)], dtype, fast)
    if fast or dtype is torch.float64:
        return infix("/", PRODUCT)(args, dtype, fast)
    return call("tl.div_rn")(args, dtype, fast)


def _truncdiv(args: Sequence[Code], dtype: torch.dtype, fast: bool) -> Code:
    return compose("{}({})", "libdevice.trunc", _truediv(args, dtype, False))


def _neg(args: Sequence[Code], dtype: torch.dtype, fast: bool) -> Code:
    if dtype.is_floating_point:  # Triton's unary minus is 0 - x, which loses the sign of zero
        return compose("{} * -1.0", args[0].at(PRODUCT), binds=PRODUCT)
    return minus(args[0])


def _shift(sign: str, checked: str) -> Emitter:
    def emitted(args: Sequence[Code], dtype: torch.dtype, fast: bool) -> Code:
        by = args[1].number
        if by is not None and 0 <= by < dtype.itemsize * 8:
            return infix(sign, SHIFT)(args, dtype, fast)
        return call(checked)(args, dtype, fast)

    return emitted


def _isinf(args: Sequence[Code], dtype: torch.dtype, fast: bool) -> Code:
    return compose('tl.abs({}) == float("inf")', args[0], binds=COMPARE)


def _not(args: Sequence[Code], dtype: torch.dtype, fast: bool) -> Code:
    if dtype is torch.uint8:  # Triton's interpreter has no ~ for it
        return compose("{} ^ 255", args[0].at(XOR), binds=XOR)
    return compose("~{}", args[0].at(UNARY), binds=UNARY)


def _checked(args: Sequence[Code], dtype: torch.dtype, fast: bool) -> Code:
    """Return a bounds check; the last operand is the mask of the tile inside its axes, `None` for everywhere."""
    index, wrap, last, here = args
    index = typed(index, dtype)
    if wrap.number == 0:
        return compose("{}({}, {}, {})", "_inside", index, last, here)
    return compose("{}({}, {}, {}, {})", "_wrapped", index, wrap, last, here)


EMITTERS: Mapping[ScalarName, Emitter] = {
    "add": by_kind(floats=infix("+", SUM), integers=infix("+", SUM), bools=infix("|", OR)),
    "sub": infix("-", SUM),
    "mul": by_kind(floats=infix("*", PRODUCT), integers=infix("*", PRODUCT), bools=infix("&", AND)),
    "truediv": _truediv,
    "floordiv": by_kind(floats=call("_float_floordiv"), integers=call("_floordiv")),
    "truncdiv": by_kind(floats=_truncdiv, integers=infix("//", PRODUCT)),
    "remainder": by_kind(floats=call("_float_remainder"), integers=call("_remainder")),
    "fmod": by_kind(floats=device("fmod"), integers=infix("%", PRODUCT)),
    "pow": by_kind(floats=device("pow"), integers=call("_power")),
    "neg": _neg,
    "abs": by_kind(floats=call("tl.abs"), integers=call("tl.abs"), bools=unchanged),
    "sign": by_kind(floats=call("_sign"), integers=call("_sign"), bools=unchanged),
    "maximum": by_kind(floats=call("_maximum"), integers=call("tl.maximum"), bools=infix("|", OR)),
    "minimum": by_kind(floats=call("_minimum"), integers=call("tl.minimum"), bools=infix("&", AND)),
    "sqrt": by_width(single="tl.sqrt_rn", double="tl.sqrt", quick="tl.sqrt"),
    "rsqrt": by_width(single="tl.rsqrt", double="libdevice.rsqrt"),
    "exp": by_width(single="libdevice.exp", double="libdevice.exp", quick="tl.exp"),
    "exp2": by_width(single="tl.exp2", double="libdevice.exp2"),
    "expm1": device("expm1"),
    "log": by_width(single="tl.log", double="libdevice.log"),
    "log2": by_width(single="tl.log2", double="libdevice.log2"),
    "log10": device("log10"),
    "log1p": device("log1p"),
    "sin": device("sin"),
    "cos": device("cos"),
    "tan": device("tan"),
    "asin": device("asin"),
    "acos": device("acos"),
    "atan": device("atan"),
    "atan2": device("atan2"),
    "sinh": device("sinh"),
    "cosh": device("cosh"),
    "tanh": by_width(single="libdevice.tanh", double="libdevice.tanh", quick="_quick_tanh"),
    "asinh": device("asinh"),
    "acosh": device("acosh"),
    "atanh": device("atanh"),
    "erf": device("erf"),
    "erfc": by_width(single="libdevice.erfc", double="libdevice.erfc", quick="_quick_erfc"),
    "lgamma": device("lgamma"),
    "floor": by_kind(floats=call("tl.floor"), integers=unchanged),
    "ceil": by_kind(floats=call("tl.ceil"), integers=unchanged),
    "trunc": by_kind(floats=device("trunc"), integers=unchanged),
    "round": by_kind(floats=device("nearbyint"), integers=unchanged),  # half to even
    "isnan": call("_isnan"),  # of an integer: never
    "isinf": by_kind(floats=_isinf, integers=call("_isnan")),
    "eq": infix("==", COMPARE),
    "ne": infix("!=", COMPARE),
    "lt": infix("<", COMPARE),
    "le": infix("<=", COMPARE),
    "gt": infix(">", COMPARE),
    "ge": infix(">=", COMPARE),
    "and": infix("&", AND),
    "or": infix("|", OR),
    "xor": infix("^", XOR),
    "not": _not,
    "shl": _shift("<<", "_shift_left"),
    "shr": _shift(">>", "_shift_right"),
    "checked": _checked,
    "bounded": unchanged,
}
