"""Writes index expressions in C: sympy over axis and size symbols becomes int64_t arithmetic.

Indices are not negative, so C's truncating `/` and `%` equal the flooring ones of the IR; dividends that may be
negative (a flipped and rolled axis) are corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy

from fusion.codegen.c.text.code import ATOM, PRODUCT, QUOTIENT, SUM, UNARY, Code
from fusion.lowering.errors import BuildError
from fusion.lowering.indexing import FloorDiv, Mod
from fusion.lowering.ir.division import may_be_negative
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Op
from fusion.lowering.ir.scalar_ops import ScalarName

Names = Mapping[sympy.Symbol, str]

_INDEX_OPS: Mapping[ScalarName, Callable[..., sympy.Expr]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
}


def affine(expr: Expr) -> sympy.Expr | None:
    """Return an integer expression as an index; None if it has more than indices and their sums and products."""
    if expr.dtype.is_floating_point:
        return None
    if isinstance(expr, IndexValue):
        return expr.index
    if isinstance(expr, Const):
        return sympy.Integer(int(expr.value))
    if isinstance(expr, Cast) and expr.dtype.itemsize >= 4:
        return affine(expr.arg)
    if isinstance(expr, Op) and expr.name in _INDEX_OPS:
        parts = [affine(arg) for arg in expr.args]
        known = [part for part in parts if part is not None]
        return _INDEX_OPS[expr.name](*known) if len(known) == len(parts) else None
    return None


def index_text(expr: sympy.Expr, names: Names) -> str:
    """Return `expr` in C; a sum or difference is not parenthesised.

    >>> i, j = sympy.symbols("i j", integer=True, nonnegative=True)
    >>> index_text(12 * i + j - 3, {i: "i0", j: "i1"}), index_text(FloorDiv(i + 1, 4) * j, {i: "i0", j: "i1"})
    ('12*i0 + i1 - 3', '((i0 + 1)/4)*i1')
    >>> index_text(Mod(1 - i, 8), {i: "i0"})
    '((1 - i0)%8 + 8)%8'

    Raises:
        BuildError: an unknown symbol or function.
    """
    return index_code(expr, names).text


def index_code(expr: sympy.Expr, names: Names) -> Code:
    """Return `expr` as an operand; see `index_text`."""
    if not expr.is_Add:
        return _factor(expr, names)
    text = ""
    for term in expr.as_ordered_terms():
        negative = bool(term.as_coeff_Mul()[0].is_negative)
        part = _product(-term if negative else term, names)
        text += (" - " if negative else " + ") + str(part) if text else (f"-{part}" if negative else str(part))
    return Code(text, SUM)


def _product(expr: sympy.Expr, names: Names) -> Code:
    if not expr.is_Mul:
        return _factor(expr, names)
    number, rest = expr.as_coeff_Mul()
    assert isinstance(number, sympy.Rational), "an index has no other numbers"
    parts = [str(number.p)] if number.p != 1 else []
    parts += [_factor(factor, names).at(PRODUCT) for factor in sorted(sympy.Mul.make_args(rest), key=str)]
    text = "*".join(parts)
    return Code(text, PRODUCT) if number.q == 1 else Code(f"({text})/{number.q}", QUOTIENT)


def _factor(expr: sympy.Expr, names: Names) -> Code:
    if expr.is_Integer:
        value = int(expr)
        return Code(f"{value}L" if abs(value) >= 1 << 31 else str(value), UNARY if value < 0 else ATOM)
    if isinstance(expr, sympy.Symbol):
        if expr not in names:
            raise BuildError(f"index expression uses the unknown symbol {expr}")
        return Code(names[expr])
    if expr.is_Mul:
        return _product(expr, names)
    if isinstance(expr, (FloorDiv, Mod)):
        whole, divisor = (_operand(arg, names) for arg in expr.args)
        rest = f"{whole}%{divisor}"
        if may_be_negative(expr.args[0]):
            rest = f"({rest} + {divisor})%{divisor}"
            return Code(f"({whole} - {rest})/{divisor}" if isinstance(expr, FloorDiv) else rest, QUOTIENT)
        return Code(f"{whole}/{divisor}" if isinstance(expr, FloorDiv) else rest, QUOTIENT)
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
        return Code("*".join([_operand(expr.base, names)] * int(expr.exp)), PRODUCT)
    if isinstance(expr, (sympy.Max, sympy.Min)):
        name = "imax" if isinstance(expr, sympy.Max) else "imin"
        text = index_text(expr.args[0], names)
        for arg in expr.args[1:]:
            text = f"{name}({text}, {index_text(arg, names)})"
        return Code(text)
    if expr.is_Add:
        return Code(f"({index_text(expr, names)})")
    raise BuildError(f"no C text for the index expression {expr}")


def _operand(expr: sympy.Expr, names: Names) -> str:
    text = index_text(expr, names)
    return text if expr.is_Symbol or expr.is_Integer else f"({text})"
