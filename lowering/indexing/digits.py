"""Recognises mixed-radix numbers: sums of axes or digits of axes, each times the less significant extents.

Input: an index; output: its digits, or None where it has another form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import sympy

from fusion.lowering.indexing.intervals import Facts, Sizes, expanded, facts_of
from fusion.lowering.ir.division import ONE, ZERO, FloorDiv, Mod


@dataclass(frozen=True, slots=True)
class Digit:
    """`(axis // divisor) % size`, a whole axis or a digit of one."""

    axis: sympy.Symbol
    divisor: sympy.Expr
    size: sympy.Expr


def radix_terms(expr: sympy.Expr, sizes: Sizes) -> tuple[Digit, ...] | None:
    """Decompose `expr` into the digits of a mixed-radix number, least significant first; None if it is not one."""
    return _radix(expr, facts_of(expr, sizes))


def radix_extent(terms: Sequence[Digit]) -> sympy.Expr:
    """Return how many values a mixed-radix number takes: it covers all of `[0, extent)`."""
    return expanded(sympy.Mul(*(term.size for term in terms)))


@lru_cache(maxsize=1 << 16)
def _radix(expr: sympy.Expr, facts: Facts) -> tuple[Digit, ...] | None:
    sizes = dict(facts)
    weights: dict[Digit, sympy.Expr] = {}
    for term in sympy.Add.make_args(expanded(expr)):
        if term == 0:
            continue
        factors = [f for f in sympy.Mul.make_args(term) if f in sizes or isinstance(f, (FloorDiv, Mod))]
        digit = _digit(factors[0], sizes) if len(factors) == 1 else None
        if digit is None:
            return None
        weights[digit] = weights.get(digit, ZERO) + term / factors[0]
    weight = ONE
    ordered: list[Digit] = []
    while weights:
        candidates = [digit for digit, scale in weights.items() if scale == weight]
        if not candidates:
            return None
        digit = min(candidates, key=lambda d: d.size != 1)  # of several with this weight all but the last have size 1
        del weights[digit]
        ordered.append(digit)
        weight = expanded(weight * digit.size)
    return tuple(ordered)


def _digit(factor: sympy.Expr, sizes: Sizes) -> Digit | None:
    size: sympy.Expr | None = None
    divisor: sympy.Expr = ONE
    if isinstance(factor, Mod):
        factor, size = factor.args
    if isinstance(factor, FloorDiv):
        factor, divisor = factor.args
    if not isinstance(factor, sympy.Symbol) or factor not in sizes:
        return None
    if size is None:
        size = sizes[factor] / divisor
        if not size.is_integer:
            return None
    return Digit(factor, divisor, size)
