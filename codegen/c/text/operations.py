"""Writes each scalar operation in C: a table with one row each, and the keys of `SCALAR_OPS`.

A row is a `Template`, or one each for floats, integers and bools; None if eager has no such operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from fusion.codegen.c.text.code import ATOM, BITS, CHOICE, COMPARE, PRODUCT, QUOTIENT, SUM, UNARY, Code
from fusion.codegen.c.text.library import C_FLOATS, LIBRARY
from fusion.codegen.c.text.storage import COMPUTED, VALUE_TYPES, narrowed, widened
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.scalar_ops import ScalarName


@dataclass(frozen=True, slots=True)
class Template:
    """Gives the text of an operation.

    Attributes:
        text: `{0}`, `{1}`, `{2}` are operands, `{T}` the C type held, `{f}` the suffix of its math functions.
        takes: the precedence that each operand needs.
        binds: its own precedence.
        promotes: C computes it in `int` where the type held is narrower.
    """

    text: str
    takes: tuple[int, ...]
    binds: int = ATOM
    promotes: bool = True

    def of(self, operands: Sequence[Code], held: str = "") -> Code:
        """Return the operation on `operands`, computed in the C type `held`."""
        texts = (operand.at(level) for operand, level in zip(operands, self.takes, strict=True))
        return Code(self.text.format(*texts, T=held, f="f" if held == "float" else ""), self.binds)


_PRECEDENCES = {
    "+": (SUM, QUOTIENT, SUM),
    "-": (SUM, QUOTIENT, SUM),
    "*": (QUOTIENT, UNARY, PRODUCT),
    "/": (QUOTIENT, UNARY, QUOTIENT),
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), (SUM, SUM, COMPARE)),
    **dict.fromkeys("&|^", (UNARY, UNARY, BITS)),
}
"""Operator → the precedence that its operands need, and its own."""


def infix(sign: str) -> Template:
    """Return an operator between two operands."""
    left, right, binds = _PRECEDENCES[sign]
    return Template(f"{{0}} {sign} {{1}}", (left, right), binds)


def prefix(sign: str) -> Template:
    """Return an operator before its operand."""
    return Template(f"{sign}{{0}}", (ATOM,), UNARY)


def call(function: str, count: int = 1) -> Template:
    """Return a call with `count` operands."""
    return Template(f"{function}({', '.join(f'{{{k}}}' for k in range(count))})", (CHOICE,) * count, promotes=False)


UNCHANGED = Template("{0}", (ATOM,))
FALSE = Template("0", (ATOM,))

Row: TypeAlias = Template | tuple[Template | None, Template | None, Template | None]

OPERATIONS: Mapping[ScalarName, Row] = {
    "add": (infix("+"), infix("+"), infix("|")),
    "sub": (infix("-"), infix("-"), None),
    "mul": (infix("*"), infix("*"), infix("&")),
    "truediv": (infix("/"), None, None),
    "floordiv": (call("floordiv_{T}", 2), call("floordiv_{T}", 2), None),
    "truncdiv": (Template("__builtin_trunc{f}({0} / {1})", (QUOTIENT, UNARY)), call("truncdiv_{T}", 2), None),
    "remainder": (call("remainder_{T}", 2), call("remainder_{T}", 2), None),
    "fmod": (call("fmod_{T}", 2), call("fmod_{T}", 2), None),
    "pow": (call("pow{f}", 2), call("pow_{T}", 2), None),
    "neg": (prefix("-"), prefix("-"), None),
    "abs": (call("__builtin_fabs{f}"), call("abs_{T}"), UNCHANGED),
    "sign": (call("sign_{T}"), call("sign_{T}"), UNCHANGED),
    "maximum": (call("maximum_{T}", 2), call("maximum_{T}", 2), infix("|")),
    "minimum": (call("minimum_{T}", 2), call("minimum_{T}", 2), infix("&")),
    "sqrt": (call("__builtin_sqrt{f}"), None, None),
    "rsqrt": (Template("1 / __builtin_sqrt{f}({0})", (CHOICE,), QUOTIENT), None, None),
    **{
        name: (call(f"{name}{{f}}"), None, None)
        for name in (
            *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc"),
            *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
        )
    },
    "atan2": (call("atan2{f}", 2), None, None),
    "lgamma": (call("lgamma_{T}"), None, None),
    "floor": (call("__builtin_floor{f}"), UNCHANGED, None),
    "ceil": (call("__builtin_ceil{f}"), UNCHANGED, None),
    "trunc": (call("__builtin_trunc{f}"), UNCHANGED, None),
    "round": (call("__builtin_rint{f}"), UNCHANGED, None),  # the rounding mode is to nearest, ties to even
    "isnan": (call("__builtin_isnan"), FALSE, FALSE),
    "isinf": (Template("__builtin_fabs{f}({0}) == __builtin_inf{f}()", (ATOM,), COMPARE), FALSE, FALSE),
    "eq": infix("=="),
    "ne": infix("!="),
    "lt": infix("<"),
    "le": infix("<="),
    "gt": infix(">"),
    "ge": infix(">="),
    "and": (None, infix("&"), infix("&")),
    "or": (None, infix("|"), infix("|")),
    "xor": (None, infix("^"), infix("^")),
    "not": (None, prefix("~"), prefix("!")),
    "shl": (None, call("shl_{T}", 2), None),
    "shr": (None, call("shr_{T}", 2), None),
    "where": Template("{0} ? {1} : {2}", (COMPARE,) * 3, CHOICE),
    "bounded": (None, None, Template("{0}", (ATOM,) * 3)),  # the bounds are of use before a loop, not here
}

_OWN = frozenset(("exp", "erf"))
"""Functions defined for floats only (`functions.py`); C's library has them for doubles."""


def operation_code(name: ScalarName, dtype: torch.dtype, result: torch.dtype, operands: Sequence[Code]) -> Code:
    """Return operation `name` on operands held as `dtype` (of the last one for `where`).

    >>> x, y = Code("x"), Code("y")
    >>> str(operation_code("mul", torch.float32, torch.float32, [x, y]))
    'x * y'
    >>> (
    ...     str(operation_code("add", torch.int8, torch.int8, [x, y])),
    ...     str(operation_code("tanh", torch.float64, torch.float64, [x])),
    ... )
    ('(int8_t)(x + y)', 'tanh(x)')

    Raises:
        BuildError: no such operation on this dtype.
    """
    row = OPERATIONS.get(name)
    kind = 0 if dtype.is_floating_point else 2 if dtype is torch.bool else 1
    template = row[kind] if isinstance(row, tuple) else row
    if template is None or dtype not in VALUE_TYPES:
        raise BuildError(f"the C target has no text for {name} of {dtype}")
    if name == "where":  # nothing is computed, so nothing is widened
        return template.of(operands)
    held = COMPUTED[dtype]
    is_own = name in _OWN and held == "float"
    if is_own:
        template = call(f"{name}_float")
    code = template.of([widened(dtype, each) for each in operands], held)
    if not is_own and f"{name}{C_FLOATS.get(held, '')}" in LIBRARY:
        code = replace(code, unconditional=True)
    if result is torch.bool:
        return code
    if kind == 1 and dtype.itemsize < 4 and template.promotes:  # wrap as the narrow type does
        return Code(f"({held})({code})")
    return narrowed(dtype, code)
