"""Inverts index maps: axes as functions of indices, and the points at which an axis must be split for that."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import sympy

from fusion.lowering.indexing.digits import Digit, radix_extent, radix_terms
from fusion.lowering.indexing.intervals import Sizes, expanded
from fusion.lowering.indexing.laws import simplify
from fusion.lowering.ir.affine import symbols_of
from fusion.lowering.ir.division import ONE, ZERO, FloorDiv, Mod


@dataclass(frozen=True, slots=True)
class Inverse:
    """Solution of `values = exprs(axes)` for the axes.

    `axes` gives each determined axis as an expression over the value symbols; `free` lists the axes that the values do
    not depend on, in their original order.
    """

    axes: dict[sympy.Symbol, sympy.Expr]
    free: tuple[sympy.Symbol, ...]


def invert(
    exprs: Sequence[sympy.Expr],
    values: Sequence[sympy.Symbol],
    value_sizes: Sequence[sympy.Expr],
    axes: Sequence[sympy.Symbol],
    sizes: Sizes,
) -> Inverse | None:
    """Solve `values[j] = exprs[j]` for `axes`; None unless the map is a bijection onto the box of `value_sizes`.

    Each expression must be a mixed-radix number of whole axes, as reshapes, transposes and splits produce, or such a
    number counted from the other end; or an axis is spread over several expressions as its digits.

    >>> from fusion.lowering.indexing import axis_symbol
    >>> b, s, n = (axis_symbol(k) for k in range(3))
    >>> v, w = sympy.symbols("v w", integer=True, nonnegative=True)
    >>> sizes = {b: sympy.Integer(2), s: sympy.Integer(4), n: sympy.Integer(8)}
    >>> inverse = invert([4 * b + s, n], [v, w], [sympy.Integer(8), sympy.Integer(8)], [b, s, n], sizes)
    >>> inverse.axes[b], inverse.axes[s], inverse.axes[n], inverse.free
    (v//4, Mod(v, 4), w, ())
    """
    single: dict[sympy.Symbol, sympy.Expr] = {axis: ZERO for axis in axes if sizes[axis] == 1}
    solved: dict[sympy.Symbol, sympy.Expr] = {}
    digits: dict[sympy.Symbol, dict[sympy.Expr, tuple[sympy.Expr, sympy.Expr]]] = {}  # divisor: (size, value)
    for expr, value, extent in zip(exprs, values, value_sizes, strict=True):
        used = symbols_of(expr)
        solved.update((axis, ZERO) for axis in used if axis in single)
        number = _number(expr.xreplace(single) if single else expr, value, extent, sizes)
        if number is None:
            return None
        for digit, digit_value in _digit_values(*number):
            if digit.divisor in digits.setdefault(digit.axis, {}):
                return None
            digits[digit.axis][digit.divisor] = (digit.size, digit_value)
    for axis, parts in digits.items():
        total = _total(parts, sizes[axis])
        if total is None:
            return None
        solved[axis] = total
    return Inverse(solved, tuple(a for a in axes if a not in solved))


def _number(
    expr: sympy.Expr, value: sympy.Expr, extent: sympy.Expr, sizes: Sizes
) -> tuple[tuple[Digit, ...], sympy.Expr] | None:
    """Return the digits of `expr` and the number that they represent: `value`, or `extent - 1 - value`.

    (The index of a flipped tensor counts down.)  None unless `expr` takes each value below `extent` once.
    """
    expr = simplify(expr, sizes)
    digits = radix_terms(expr, sizes)
    if digits is None:
        digits, value = radix_terms(simplify(extent - 1 - expr, sizes), sizes), extent - 1 - value
    return None if digits is None or radix_extent(digits) != expanded(extent) else (digits, value)


def _digit_values(digits: Sequence[Digit], number: sympy.Expr) -> Iterator[tuple[Digit, sympy.Expr]]:
    """Yield each of `digits`, least significant first, with its value as a function of `number`."""
    weight: sympy.Expr = ONE
    for digit in digits:
        place = FloorDiv(number, weight)
        weight = weight * digit.size
        yield digit, place if digit is digits[-1] else Mod(place, digit.size)


def _total(places: dict[sympy.Expr, tuple[sympy.Expr, sympy.Expr]], extent: sympy.Expr) -> sympy.Expr | None:
    """Recombine an axis of `extent` points from its digits (divisor: size and value); None if a digit is missing."""
    weight, total = ONE, ZERO
    rest = dict(places)
    while weight in rest:
        size, value = rest.pop(weight)
        total += weight * value
        weight = expanded(weight * size)
    return None if rest or weight != expanded(extent) else total


def split_points(exprs: Iterable[sympy.Expr], axis: sympy.Symbol, size: sympy.Expr) -> list[int]:
    """Return the divisors at which `axis` must be split so that no expression needs `//` or `%` of it; ascending.

    Empty if there is nothing to split, or if the divisors do not form a chain that divides `size`.
    """
    if not size.is_Integer:
        return []
    points: set[int] = set()
    for expr in exprs:
        for atom in expr.atoms(FloorDiv, Mod):
            inner, divisor = atom.args
            if inner == axis and divisor.is_Integer:
                points.add(int(divisor))
            elif isinstance(atom, Mod) and isinstance(inner, FloorDiv) and inner.args[0] == axis:
                if not (divisor.is_Integer and inner.args[1].is_Integer):
                    return []
                points.add(int(inner.args[1]) * int(divisor))
            elif axis in inner.free_symbols and not isinstance(inner, FloorDiv):
                return []
    chain = sorted(points | {int(size)})
    if any(b % a for a, b in itertools.pairwise(chain)):
        return []
    return [p for p in chain if p < int(size)]
