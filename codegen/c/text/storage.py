"""Maps dtypes to C: their types in memory and in computations, constants and casts.

bfloat16 and float16 are held as `uint16_t`, as in memory: moving them is free and changes no bit, and arithmetic on
them goes through float.  bool is `uint8_t` in memory and held as `_Bool`.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from fusion.codegen.c.text.code import ATOM, CHOICE, COMPARE, UNARY, Code
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.expr import Scalar

MEMORY: dict[torch.dtype, str] = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "uint16_t",
    torch.float16: "uint16_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.uint8: "uint8_t",
    torch.bool: "uint8_t",
}
"""C type of an element in memory."""

VALUE_TYPES: dict[torch.dtype, str] = {**MEMORY, torch.bool: "_Bool"}
"""C type of a value."""

NARROW_FLOATS = {torch.bfloat16: "bf16", torch.float16: "half"}

COMPUTED: dict[torch.dtype, str] = {**VALUE_TYPES, **dict.fromkeys(NARROW_FLOATS, "float")}
"""C type in which arithmetic on a dtype is done."""


def memory_type(dtype: torch.dtype) -> str:
    """Return the C type of an element in memory.

    Raises:
        BuildError: elements of this dtype are not supported.
    """
    if dtype not in MEMORY:
        raise BuildError(f"the C target does not know the element type {dtype}")
    return MEMORY[dtype]


def loaded(dtype: torch.dtype, element: Code) -> Code:
    """Return the value of a memory element.

    >>> str(loaded(torch.bool, Code("x[i0]"))), str(loaded(torch.float32, Code("x[i0]")))
    ('(x[i0] != 0)', 'x[i0]')
    """
    return Code(f"({element} != 0)", unconditional=True) if dtype is torch.bool else element


def widened(dtype: torch.dtype, value: Code) -> Code:
    """Return a value in the type in which arithmetic on its dtype is done.

    >>> str(widened(torch.bfloat16, Code("x"))), str(widened(torch.float32, Code("x")))
    ('from_bf16(x)', 'x')
    """
    return Code(f"from_{NARROW_FLOATS[dtype]}({value})") if dtype in NARROW_FLOATS else value


def narrowed(dtype: torch.dtype, value: Code) -> Code:
    """Return the result of arithmetic as a value of `dtype`: rounds to the narrow floats.

    >>> str(narrowed(torch.float16, Code("x"))), str(narrowed(torch.float32, Code("x")))
    ('to_half(x)', 'x')
    """
    return Code(f"to_{NARROW_FLOATS[dtype]}({value})") if dtype in NARROW_FLOATS else value


def converted(source: torch.dtype, target: torch.dtype, value: Code) -> Code:
    """Convert a value of `source` to `target` as PyTorch does: truncating, `!= 0` for bool, rounding to nearest even.

    >>> str(converted(torch.float32, torch.uint8, Code("t0"))), str(converted(torch.int64, torch.bool, Code("t0")))
    ('(uint8_t)float_to_int32_t(t0)', '(t0 != 0)')
    """
    if source is target:
        return value
    value, held = widened(source, value), COMPUTED[source]
    if target is torch.bool:
        return Code(f"({value.at()} != 0)")
    if target in NARROW_FLOATS:
        return narrowed(target, value if held == "float" else Code(f"(float){value.at()}"))
    if held == VALUE_TYPES[target]:
        return value
    if source is torch.bool:  # GCC vectorises the select, but not a cast if the bool is stored too
        return Code(f"{value.at(COMPARE)} ? {constant(True, target)} : {constant(False, target)}", CHOICE)
    if source.is_floating_point and not target.is_floating_point:
        if target.itemsize < 4:  # floats have no direct conversion to narrow integers; eager does the same
            return Code(f"({VALUE_TYPES[target]}){held}_to_int32_t({value})")
        return Code(f"{held}_to_{VALUE_TYPES[target]}({value})")
    return Code(f"({VALUE_TYPES[target]}){value.at()}")


def constant(value: Scalar, dtype: torch.dtype) -> Code:
    """Return a literal.

    >>> [str(constant(each, torch.float32)) for each in (0.1, -0.0, float("inf"))]
    ['0.1f', '-0.0f', '__builtin_inff()']
    """
    if dtype is torch.bool:
        return Code("1" if value else "0")
    if not dtype.is_floating_point:
        integer = int(value)
        if integer == torch.iinfo(torch.int64).min:
            return Code("(-9223372036854775807L - 1)")
        return Code(f"{integer}L" if dtype is torch.int64 else str(integer), UNARY if integer < 0 else ATOM)
    number = float(torch.tensor(float(value), dtype=torch.float64).to(dtype).to(torch.float64))
    suffix = "" if dtype is torch.float64 else "f"
    if math.isnan(number):
        return narrowed(dtype, Code(f'__builtin_nan{suffix}("")'))
    negative = math.copysign(1.0, number) < 0
    if math.isinf(number):
        text = f"{'-' if negative else ''}__builtin_inf{suffix}()"
    else:
        text = repr(number) if dtype is torch.float64 else str(np.float32(number))
        text += suffix if "." in text or "e" in text else f".0{suffix}"
    return narrowed(dtype, Code(text, UNARY if negative else ATOM))
