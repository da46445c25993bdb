"""Maps dtypes to C: their types in memory and in computations, constants and casts.

bfloat16 and float16 are held as `uint16_t`, as in memory: moving them is free and changes no bit, and arithmetic on
them goes through float.  bool is `uint8_t` in memory and held as `_Bool`.
"""

from __future__ import annotations

import math
import re

import numpy as np
import torch

from fusion.lowering.errors import BuildError
from fusion.lowering.expr import Scalar

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

HELD: dict[torch.dtype, str] = {**MEMORY, torch.bool: "_Bool"}
"""C type of a value."""

NARROW_FLOATS = {torch.bfloat16: "bf16", torch.float16: "half"}

COMPUTED: dict[torch.dtype, str] = {**HELD, **dict.fromkeys(NARROW_FLOATS, "float")}
"""C type in which arithmetic on a dtype is done."""


# The precedence of C's operators, loosest first.
CHOICE, BITS, COMPARE, SUM, PRODUCT, UNARY, ATOM = range(7)

_OPERATOR = re.compile(
    r"(?P<bracket>[(\[])|(?P<end>[)\]])"
    r"| (?:(?P<choice>\?)|(?P<bits>[&|^])|(?P<compare>[<>]=?|[!=]=)|(?P<sum>[-+])) "
    r"|(?P<product>[*/%])|^(?P<unary>[-!~])"
)
_BINDS = {"choice": CHOICE, "bits": BITS, "compare": COMPARE, "sum": SUM, "product": PRODUCT, "unary": UNARY}


def binds(text: str) -> int:
    """Return the precedence of the loosest operator of `text` outside of brackets; binary ones but products are spaced.

    >>> binds("a[i + 1]") == ATOM, binds("f(x)*b + c") == SUM, binds("-1e-05f") == UNARY
    (True, True, True)
    """
    inside, loosest = 0, ATOM
    for match in _OPERATOR.finditer(text):
        kind = match.lastgroup or ""
        inside += (kind == "bracket") - (kind == "end")
        if not inside:
            loosest = min(loosest, _BINDS.get(kind, ATOM))
    return loosest


def operand(text: str, level: int = ATOM) -> str:
    """Return `text` as an operand with at least the precedence `level`.

    >>> operand("a[i + 1]"), operand("a + b"), operand("-a"), operand("i0/4"), operand("i0/4", SUM)
    ('a[i + 1]', '(a + b)', '(-a)', '(i0/4)', 'i0/4')
    """
    return text if binds(text) >= level else f"({text})"


def memory_type(dtype: torch.dtype) -> str:
    """Return the C type of an element in memory.

    Raises:
        BuildError: elements of this dtype are not supported.
    """
    if dtype not in MEMORY:
        raise BuildError(f"the C target does not know the element type {dtype}")
    return MEMORY[dtype]


def loaded(dtype: torch.dtype, element: str) -> str:
    """Return the value of a memory element.

    >>> loaded(torch.bool, "x[i0]"), loaded(torch.float32, "x[i0]")
    ('(x[i0] != 0)', 'x[i0]')
    """
    return f"({element} != 0)" if dtype is torch.bool else element


def widened(dtype: torch.dtype, value: str) -> str:
    """Return a value in the type in which arithmetic on its dtype is done.

    >>> widened(torch.bfloat16, "x[i0]"), widened(torch.float32, "x[i0]")
    ('from_bf16(x[i0])', 'x[i0]')
    """
    return f"from_{NARROW_FLOATS[dtype]}({value})" if dtype in NARROW_FLOATS else value


def narrowed(dtype: torch.dtype, value: str) -> str:
    """Return the result of arithmetic as a value of `dtype`: rounds to the narrow floats.

    >>> narrowed(torch.float16, "x + y"), narrowed(torch.float32, "x + y")
    ('to_half(x + y)', 'x + y')
    """
    return f"to_{NARROW_FLOATS[dtype]}({value})" if dtype in NARROW_FLOATS else value


def converted(source: torch.dtype, target: torch.dtype, value: str) -> str:
    """Convert a value of `source` to `target` as PyTorch does: truncating, `!= 0` for bool, rounding to nearest even.

    >>> converted(torch.float32, torch.uint8, "t0"), converted(torch.int64, torch.bool, "a + b")
    ('(uint8_t)float_to_int32_t(t0)', '((a + b) != 0)')
    """
    if source is target:
        return value
    value, held = widened(source, value), COMPUTED[source]
    if target is torch.bool:
        return f"({operand(value)} != 0)"
    if target in NARROW_FLOATS:
        return narrowed(target, value if held == "float" else f"(float){operand(value)}")
    if held == HELD[target]:
        return value
    if source is torch.bool:  # GCC vectorises the select, but not a cast if the bool is stored too
        return f"{operand(value, COMPARE)} ? {constant(True, target)} : {constant(False, target)}"
    if source.is_floating_point and not target.is_floating_point:
        if target.itemsize < 4:  # floats have no direct conversion to narrow integers; eager does the same
            return f"({HELD[target]}){held}_to_int32_t({value})"
        return f"{held}_to_{HELD[target]}({value})"
    return f"({HELD[target]}){operand(value)}"


def constant(value: Scalar, dtype: torch.dtype) -> str:
    """Return a literal.

    >>> constant(0.1, torch.float32), constant(-0.0, torch.float64), constant(float("inf"), torch.float32)
    ('0.1f', '-0.0', '__builtin_inff()')
    """
    if dtype is torch.bool:
        return "1" if value else "0"
    if not dtype.is_floating_point:
        integer = int(value)
        if integer == torch.iinfo(torch.int64).min:
            return "(-9223372036854775807L - 1)"
        return f"{integer}L" if dtype is torch.int64 else str(integer)
    number = float(torch.tensor(float(value), dtype=torch.float64).to(dtype).to(torch.float64))
    suffix = "" if dtype is torch.float64 else "f"
    if math.isnan(number):
        text = f'__builtin_nan{suffix}("")'
    elif math.isinf(number):
        text = f"{'-' if number < 0 else ''}__builtin_inf{suffix}()"
    else:
        text = repr(number) if dtype is torch.float64 else str(np.float32(number))
        text += suffix if "." in text or "e" in text else f".0{suffix}"
    return narrowed(dtype, text)
