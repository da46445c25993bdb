"""Writes each scalar operation in C: a table with one row each, and the keys of `SCALAR_OPS`.

A row is a template; a tuple holds one template for floats, one for integers and one for bools, "" if eager has no such
operation.  `{0}`, `{1}`, `{2}` are operands, `{T}` the C type held, `{f}` the suffix of its math functions.
"""

from __future__ import annotations

import re

import torch

from fusion.codegen.c.text.storage import (
    ATOM,
    COMPARE,
    COMPUTED,
    HELD,
    PRODUCT,
    SUM,
    UNARY,
    narrowed,
    operand,
    widened,
)
from fusion.lowering.errors import BuildError

OPERATIONS: dict[str, str | tuple[str, str, str]] = {
    "add": ("{0} + {1}", "{0} + {1}", "{0} | {1}"),
    "sub": ("{0} - {1}", "{0} - {1}", ""),
    "mul": ("{0} * {1}", "{0} * {1}", "{0} & {1}"),
    "truediv": ("{0} / {1}", "", ""),
    "floordiv": ("floordiv_{T}({0}, {1})", "floordiv_{T}({0}, {1})", ""),
    "truncdiv": ("__builtin_trunc{f}({0} / {1})", "truncdiv_{T}({0}, {1})", ""),
    "remainder": ("remainder_{T}({0}, {1})", "remainder_{T}({0}, {1})", ""),
    "fmod": ("fmod_{T}({0}, {1})", "fmod_{T}({0}, {1})", ""),
    "pow": ("pow{f}({0}, {1})", "pow_{T}({0}, {1})", ""),
    "neg": ("-{0}", "-{0}", ""),
    "abs": ("__builtin_fabs{f}({0})", "abs_{T}({0})", "{0}"),
    "sign": ("sign_{T}({0})", "sign_{T}({0})", "{0}"),
    "maximum": ("maximum_{T}({0}, {1})", "maximum_{T}({0}, {1})", "{0} | {1}"),
    "minimum": ("minimum_{T}({0}, {1})", "minimum_{T}({0}, {1})", "{0} & {1}"),
    "sqrt": ("__builtin_sqrt{f}({0})", "", ""),
    "rsqrt": ("1 / __builtin_sqrt{f}({0})", "", ""),
    **{
        name: (f"{name}{{f}}({{0}})", "", "")
        for name in (
            *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc"),
            *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
        )
    },
    "atan2": ("atan2{f}({0}, {1})", "", ""),
    "lgamma": ("lgamma_{T}({0})", "", ""),
    "floor": ("__builtin_floor{f}({0})", "{0}", ""),
    "ceil": ("__builtin_ceil{f}({0})", "{0}", ""),
    "trunc": ("__builtin_trunc{f}({0})", "{0}", ""),
    "round": ("__builtin_rint{f}({0})", "{0}", ""),  # the rounding mode is to nearest, ties to even
    "isnan": ("__builtin_isnan({0})", "0", "0"),
    "isinf": ("__builtin_fabs{f}({0}) == __builtin_inf{f}()", "0", "0"),
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "and": ("", "{0} & {1}", "{0} & {1}"),
    "or": ("", "{0} | {1}", "{0} | {1}"),
    "xor": ("", "{0} ^ {1}", "{0} ^ {1}"),
    "not": ("", "~{0}", "!{0}"),
    "shl": ("", "shl_{T}({0}, {1})", ""),
    "shr": ("", "shr_{T}({0}, {1})", ""),
    "where": "{0} ? {1} : {2}",
}

_LEVELS = {
    **dict.fromkeys("+-", (SUM, SUM + 1)),
    **dict.fromkeys("*/", (PRODUCT, PRODUCT + 1)),
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), (SUM, SUM)),
    **dict.fromkeys("&|^", (UNARY, UNARY)),
}
"""Operator between two operands → the precedence that each needs."""

_BETWEEN = re.compile(r"\{0\} (\S+) \{1\}")

_CALL = re.compile(r"(1 / )?\w+(\{\w\})?\(\{0\}(, \{1\})?\)")
"""Templates that are calls: their operands need no parentheses."""

_OWN = frozenset(("exp", "erf"))
"""Functions defined for floats only (`functions.py`); C's library has them for doubles."""


def operation_text(name: str, dtype: torch.dtype, result: torch.dtype, operands: list[str]) -> str:
    """Return the C expression of operation `name` on operands held as `dtype` (of the last one for `where`).

    >>> operation_text("mul", torch.float32, torch.float32, ["x", "y"])
    'x * y'
    >>> (
    ...     operation_text("add", torch.int8, torch.int8, ["x", "y"]),
    ...     operation_text("tanh", torch.float64, torch.float64, ["x"]),
    ... )
    ('(int8_t)(x + y)', 'tanh(x)')

    Raises:
        BuildError: no such operation on this dtype.
    """
    row = OPERATIONS.get(name, "")
    kind = 0 if dtype.is_floating_point else 2 if dtype is torch.bool else 1
    template = row if isinstance(row, str) else row[kind]
    if not template or dtype not in HELD:
        raise BuildError(f"the C target has no text for {name} of {dtype}")
    if name == "where":
        return template.format(*(operand(text, COMPARE) for text in operands))
    held = COMPUTED[dtype]
    if name in _OWN and held == "float":
        template = f"{name}_float({{0}})"
    operands = [widened(dtype, text) for text in operands]
    if not _CALL.fullmatch(template):
        sign = _BETWEEN.search(template)
        levels = _LEVELS[sign[1]] if sign is not None else (ATOM,) * len(operands)
        operands = [operand(text, level) for text, level in zip(operands, levels, strict=True)]
    text = template.format(*operands, T=held, f="f" if held == "float" else "")
    if result is torch.bool:
        return text
    if kind == 1 and dtype.itemsize < 4 and template[0] in "{-~":  # C computed in int: wrap as the narrow type does
        return f"({held})({text})"
    return narrowed(dtype, text)
