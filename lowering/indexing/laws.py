"""Simplifies `//` and `%` in indices by the bounds of their operands.

Input: an index and the sizes of its axes; output: an equal index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import sympy

from fusion.lowering.indexing.digits import radix_extent, radix_terms
from fusion.lowering.indexing.intervals import Facts, Sizes, expanded, facts_of, interval
from fusion.lowering.ir.affine import symbols_of
from fusion.lowering.ir.division import ONE, FloorDiv, Mod


@lru_cache(maxsize=1 << 16)
def _has_digits(expr: sympy.Expr) -> bool:
    return bool(expr.has(FloorDiv, Mod))


def within(expr: sympy.Expr, size: sympy.Expr, sizes: Sizes) -> bool:
    """Return whether `0 ≤ expr < size` is certain."""
    if expr == 0 or (isinstance(expr, Mod) and expr.args[1] == size):
        return True  # a divisor is positive
    if size.is_Integer:
        limits = interval(expr, sizes)
        return limits is not None and limits[0] >= 0 and limits[1] < int(size)
    terms = radix_terms(expr, sizes)
    if terms is None:
        return False
    ratio = expanded(size) / radix_extent(terms)
    return bool(ratio.is_positive and ratio.is_integer)


# Simplification -------------------------------------------------------------------------------------------------------


def simplify(expr: sympy.Expr, sizes: Sizes) -> sympy.Expr:
    """Return an equal expression with as few `//` and `%` as the bounds allow.

    >>> from fusion.lowering.indexing import axis_symbol
    >>> b, s = axis_symbol(0), axis_symbol(1)
    >>> sizes = {b: sympy.Integer(4), s: sympy.Integer(16)}
    >>> simplify(FloorDiv(16 * b + s, 16), sizes), simplify(Mod(16 * b + s, 16), sizes)
    (i0, i1)
    >>> simplify(8 * FloorDiv(s, 8) + Mod(s, 8), sizes), simplify(2 * Mod(FloorDiv(s, 2), 4) + Mod(s, 2), sizes)
    (i1, Mod(i1, 8))
    """
    return _simplified(expr, facts_of(expr, sizes)) if _has_digits(expr) else expr


@lru_cache(maxsize=1 << 16)
def _simplified(expr: sympy.Expr, facts: Facts) -> sympy.Expr:
    sizes = dict(facts)
    rebuilt = expr.func(*(simplify(arg, sizes) for arg in expr.args)) if expr.args else expr
    if isinstance(rebuilt, FloorDiv):
        return _simplify_floordiv(rebuilt.args[0], rebuilt.args[1], sizes)
    if isinstance(rebuilt, Mod):
        return _simplify_mod(rebuilt.args[0], rebuilt.args[1], sizes)
    if rebuilt.is_Mul and any(factor.is_Add for factor in rebuilt.args):
        rebuilt = sympy.expand_mul(rebuilt)
    return _recompose(rebuilt, sizes) if isinstance(rebuilt, sympy.Add) else rebuilt


def _split_multiple(expr: sympy.Expr, of: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Return `(q, r)` with `expr = q·of + r`, taking into q every term that is a multiple of `of`."""
    quotient, rest = [], []
    for term in sympy.Add.make_args(sympy.expand_mul(expr)):
        if of.is_Integer:
            coefficient, factor = term.as_coeff_Mul()
            if coefficient % of == 0:
                quotient.append(coefficient // of * factor)
            elif term.is_Integer:
                quotient.append(term // of)
                rest.append(term % of)
            else:
                rest.append(term)
        else:
            ratio = term / of
            if ratio.is_integer and ratio.as_numer_denom()[1] == 1:
                quotient.append(ratio)
            else:
                rest.append(term)
    return sympy.Add(*quotient), sympy.Add(*rest)


def _common_factors(rest: sympy.Expr, b: sympy.Expr) -> list[sympy.Expr]:
    """Return the common divisors of single terms of `rest` with `b`, greatest first; each divides `b`."""
    divisors: set[sympy.Expr] = set()
    number, symbols = (sympy.factor_terms(b) if b.is_Add else b).as_coeff_Mul()  # a size may be s - 1
    for term in sympy.Add.make_args(rest):
        coefficient, factor = term.as_coeff_Mul()
        shared = set(sympy.Mul.make_args(factor)).intersection(sympy.Mul.make_args(symbols))
        divisors.add(sympy.Mul(math.gcd(int(coefficient), int(number)), *shared))
    return sorted(divisors - {ONE}, key=lambda g: (-len(symbols_of(g)), -int(g.as_coeff_Mul()[0]), str(g)))


def _simplify_floordiv(a: sympy.Expr, b: sympy.Expr, sizes: Sizes) -> sympy.Expr:
    quotient, rest = _split_multiple(a, b)
    if within(rest, b, sizes):
        return quotient
    if b.is_Integer and (limits := interval(rest, sizes)) and limits[0] // int(b) == limits[1] // int(b):
        return quotient + limits[0] // int(b)
    if isinstance(rest, Mod) and b.is_Integer and rest.args[1].is_Integer and rest.args[1] % b == 0:
        return quotient + simplify(Mod(FloorDiv(rest.args[0], b), rest.args[1] // b), sizes)
    for g in _common_factors(rest, b):  # (g·x + y) // (g·c) = x // c when 0 ≤ y < g
        inner, small = _split_multiple(rest, g)
        if inner != 0 and within(small, g, sizes):
            return quotient + _simplify_floordiv(inner, expanded(b / g), sizes)
    return quotient + FloorDiv(rest, b)


def _simplify_mod(a: sympy.Expr, b: sympy.Expr, sizes: Sizes) -> sympy.Expr:
    _, rest = _split_multiple(a, b)
    if within(rest, b, sizes):
        return rest
    if b.is_Integer:
        if (limits := interval(rest, sizes)) and limits[0] // int(b) == limits[1] // int(b):
            return rest - limits[0] // int(b) * b
        reduced = sympy.Add(*(_reduce_term(term, b) for term in sympy.Add.make_args(rest)))
        if reduced != rest:
            return _simplify_mod(reduced, b, sizes)
    for g in _common_factors(rest, b):  # (g·x + y) % (g·c) = g·(x % c) + y when 0 ≤ y < g
        inner, small = _split_multiple(rest, g)
        if inner != 0 and within(small, g, sizes):
            return sympy.expand_mul(g * _simplify_mod(inner, expanded(b / g), sizes)) + small
    return Mod(rest, b)


def _reduce_term(term: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """Reduce a term modulo `b`: `(b + c)·x → c·x` and `c·(x % m) → c·x` where b divides c·m."""
    coefficient, factor = term.as_coeff_Mul()
    if isinstance(factor, Mod) and factor.args[1].is_Integer and coefficient * factor.args[1] % b == 0:
        factor = factor.args[0]
    sign = 1 if coefficient > 0 else -1
    return sign * (abs(coefficient) % b) * factor


def _recompose(total: sympy.Add, sizes: Sizes) -> sympy.Expr:
    """Rewrite `c·b·(a // b) + c·(a % b) → c·a` and `c·b·(a // b % m) + c·(a % b) → c·(a % bm)`, to a fixed point."""
    terms = set(total.args)
    for term in total.args:
        for mod in (f for f in sympy.Mul.make_args(term.as_coeff_Mul()[1]) if isinstance(f, Mod)):
            a, b = mod.args
            scale = term / mod
            quotient = simplify(FloorDiv(a, b), sizes)
            parts = sympy.Add.make_args(sympy.expand_mul(scale * b * quotient))
            if term in parts or not terms.issuperset(parts):
                parts, a = _matching_quotient(total.args, mod, scale, sizes)
            if not parts:
                parts, a = _matching_digit(total.args, mod, scale, quotient)
            if parts:
                left = terms.difference(parts, {term})
                return simplify(sympy.Add(*left, sympy.expand_mul(scale * a)), sizes)
    return total


def _matching_digit(
    terms: Iterable[sympy.Expr], mod: sympy.Expr, scale: sympy.Expr, quotient: sympy.Expr
) -> tuple[tuple[sympy.Expr, ...], sympy.Expr]:
    """Find `c·b·(a // b % m)` among `terms`; return it with `a % bm`; `mod` is `a % b`, `quotient` `a // b`."""
    a, b = mod.args
    for term in terms:
        digit = next((f for f in sympy.Mul.make_args(term) if isinstance(f, Mod) and f.args[0] == quotient), None)
        if digit is not None and term == sympy.expand_mul(scale * b * digit):
            return (term,), Mod(a, b * digit.args[1])
    return (), mod


def _matching_quotient(
    terms: Iterable[sympy.Expr], mod: sympy.Expr, scale: sympy.Expr, sizes: Sizes
) -> tuple[tuple[sympy.Expr, ...], sympy.Expr]:
    """Find `c·b·(n // bd)` among `terms`; return it with `a = n // d` (`mod` may have lost multiples of b of a)."""
    b = mod.args[1]
    for term in terms if b.is_Integer else ():
        quotient = next((f for f in sympy.Mul.make_args(term) if isinstance(f, FloorDiv)), None)
        if quotient is None or term != sympy.expand_mul(scale * b * quotient):
            continue
        numerator, divisor = quotient.args
        if divisor.is_Integer and divisor % b == 0:
            a = _simplify_floordiv(numerator, divisor / b, sizes)
            if _simplify_mod(a, b, sizes) == mod:
                return (term,), a
    return (), mod
