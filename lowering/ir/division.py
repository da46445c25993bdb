"""Defines integer division for indices: `//` and `%` as Python rounds them, in a form that sympy does not have.

Input: sympy expressions over integer symbols, divisors positive; output: simplified as far as the operands alone allow.
`indexing.simplify` also uses bounds.
"""

from __future__ import annotations

import math
from functools import lru_cache

import sympy
from sympy.printing.precedence import PRECEDENCE

ZERO: sympy.Expr = sympy.Integer(0)
ONE: sympy.Expr = sympy.Integer(1)


class _Division(sympy.Expr):
    """A function of two integers, without the checks on which sympy's own `Function` spends most of its time."""

    __slots__ = ()
    is_commutative = True
    is_integer = True

    def __new__(cls, a: sympy.Expr | int, b: sympy.Expr | int) -> sympy.Expr:  # type: ignore[misc]  # the result may be a number
        return _divide(cls, sympy.sympify(a), sympy.sympify(b))  # type: ignore[arg-type]  # mypy means an instance's hash

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        """Return a simpler equal expression, from the operands alone; None where there is none."""
        raise NotImplementedError


@lru_cache(maxsize=1 << 16)
def _divide(kind: type[_Division], a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    simpler = kind.eval(a, b)
    return sympy.Expr.__new__(kind, a, b) if simpler is None else simpler


class FloorDiv(_Division):
    """`floor(a / b)` of integers, b > 0.

    >>> i = sympy.Symbol("i", integer=True)
    >>> FloorDiv(i, 1), FloorDiv(sympy.Integer(7), 2), FloorDiv(6 * i, 3)
    (i, 3, 2*i)
    >>> 4 * FloorDiv(i, 8), FloorDiv(i + 4, 8)
    (4*(i//8), (i + 4)//8)
    >>> s = sympy.Symbol("s", integer=True, positive=True)
    >>> FloorDiv(s * s, s), FloorDiv(s * i + s, 2 * s), Mod(3 * s * i, s)
    (s, (i + 1)//2, 0)
    """

    __slots__ = ()
    precedence = PRECEDENCE["Mul"]

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if b == 1 or a == 0:
            return a
        if a.is_Integer and b.is_Integer:
            return sympy.Integer(int(a) // int(b))
        if a == b:
            return ONE
        if b.is_Integer:
            divisor = math.gcd(_content(a), int(b))
            if divisor > 1:
                return FloorDiv(_over(a, divisor), int(b) // divisor)
        if isinstance(a, FloorDiv):
            return FloorDiv(a.args[0], a.args[1] * b)
        if not b.is_Integer and (common := _common(a, b)) != ONE:  # (s·a) // (s·b) for a size s > 0
            return FloorDiv(sympy.expand_mul(a / common), b / common)
        return None

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.args[0].is_nonnegative else None

    def _sympystr(self, printer: object) -> str:
        return "//".join(f"({arg})" if arg.args else str(arg) for arg in self.args)


class Mod(_Division):
    """`a mod b` of integers, b > 0, with a result in `[0, b)`.

    >>> i = sympy.Symbol("i", integer=True)
    >>> Mod(i, 1), Mod(sympy.Integer(7), 4), Mod(Mod(i, 12), 4)
    (0, 3, Mod(i, 4))
    """

    __slots__ = ()
    is_nonnegative = True

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if b == 1 or a == 0 or a == b:
            return ZERO
        if a.is_Integer and b.is_Integer:
            return sympy.Integer(int(a) % int(b))
        if isinstance(a, Mod) and a.args[1].is_Integer and b.is_Integer and a.args[1] % b == 0:
            return Mod(a.args[0], b)
        if not b.is_Integer and _common(a, b) == b:
            return ZERO
        return None


def _content(expr: sympy.Expr) -> int:
    """Return the greatest common divisor of the integer coefficients of a sum."""
    result = 0
    for term in sympy.Add.make_args(expr):
        coefficient = term.as_coeff_Mul()[0]
        if not coefficient.is_Integer:
            return 1
        result = math.gcd(result, int(coefficient))
    return result


def _common(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """Return the product of the positive symbols, with powers, that divide every term of `a` and the product `b`."""
    shared = {base: power for base, power in _powers(b).items() if base.is_positive}
    for term in sympy.Add.make_args(a) if shared else ():
        powers = _powers(term)
        shared = {base: min(power, powers[base]) for base, power in shared.items() if base in powers}
    return sympy.Mul(*(base**power for base, power in shared.items()))


def _powers(product: sympy.Expr) -> dict[sympy.Expr, int]:
    """Return the symbols of a product with their exponents."""
    factors = (factor.as_base_exp() for factor in sympy.Mul.make_args(product))
    return {base: int(power) for base, power in factors if base.is_Symbol and power.is_Integer and power > 0}


def _over(expr: sympy.Expr, by: int) -> sympy.Expr:
    terms = []
    for term in sympy.Add.make_args(expr):
        coefficient, rest = term.as_coeff_Mul()
        terms.append(coefficient / by * rest)
    return sympy.Add(*terms)


@lru_cache(maxsize=1 << 16)
def may_be_negative(expr: sympy.Expr) -> bool:
    """Return whether an index is not certainly >= 0, judged by its form alone.

    Axes and sizes are non-negative; an integer that the caller passes, or that data hold, may be negative.

    >>> i, n = sympy.Symbol("i", integer=True, nonnegative=True), sympy.Symbol("n", integer=True)
    >>> may_be_negative(2 * i + 1), may_be_negative(7 - i), may_be_negative(Mod(7 - i, 4)), may_be_negative(n)
    (False, True, False, True)
    """
    if expr.is_Integer:
        return bool(expr < 0)
    if expr.is_Symbol or isinstance(expr, Mod):
        return not expr.is_nonnegative
    if isinstance(expr, FloorDiv):
        return may_be_negative(expr.args[0])
    known = expr.is_Add or expr.is_Mul or isinstance(expr, (sympy.Max, sympy.Min))
    if isinstance(expr, sympy.Pow):
        return may_be_negative(expr.base)
    return not known or any(map(may_be_negative, expr.args))
