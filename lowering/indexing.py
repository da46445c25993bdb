"""Index arithmetic: everything that makes `//` and `%` (`division.py`) disappear from indices.

An index is an integer; it is non-negative where it is used unmasked, but parts of it need not be (`i - 3` in a
concatenation).  `sizes` maps each axis symbol to its extent, an axis `i` runs over `0 ≤ i < sizes[i]`; these bounds are
the only facts the laws below need.  What enters is a sympy expression over axis and size symbols; what leaves is an
equal one, hopefully without `//` and `%`.  Divisors are positive.

Answers are remembered per expression and the bounds of its symbols: the indices of a graph are few and asked for often.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import sympy
import torch

from lowering.division import ONE, ZERO, FloorDiv, Mod
from lowering.expr import AxisMap, Const, Expr, Index, IndexValue, Load, Op, Random, make_cast, rewrite
from lowering.sizes import where_there_are_elements

Sizes: TypeAlias = Mapping[sympy.Symbol, sympy.Expr]


def axis_symbol(k: int) -> sympy.Symbol:
    """The k-th axis of a node: `i0`, `i1`, …  Equal nodes get equal names, so their text is canonical."""
    return _symbol("i", k)


def over_symbol(k: int) -> sympy.Symbol:
    """The k-th axis that a node reduces over: `r0`, `r1`, …"""
    return _symbol("r", k)


@lru_cache(maxsize=1024)
def _symbol(prefix: str, k: int) -> sympy.Symbol:
    return sympy.Symbol(f"{prefix}{k}", integer=True, nonnegative=True)


# Bounds ---------------------------------------------------------------------------------------------------------------

Facts: TypeAlias = tuple[tuple[sympy.Symbol, sympy.Expr], ...]
"""The sizes of the symbols of one expression: with the expression, the key under which an answer is remembered."""


@lru_cache(maxsize=1 << 16)
def symbols_of(expr: sympy.Expr) -> tuple[sympy.Symbol, ...]:
    """The symbols of an index, by name; remembered, because sympy walks the expression each time."""
    return tuple(sorted(expr.free_symbols, key=str))


@lru_cache(maxsize=1 << 16)
def _has_digits(expr: sympy.Expr) -> bool:
    return bool(expr.has(FloorDiv, Mod))


def _facts(expr: sympy.Expr, sizes: Sizes) -> Facts:
    return tuple((symbol, sizes[symbol]) for symbol in symbols_of(expr) if symbol in sizes)


def bounds(expr: sympy.Expr, sizes: Sizes) -> tuple[sympy.Expr, sympy.Expr] | None:
    """The least and greatest value of `expr`, inclusive; None where they are not known as integers.

    They hold always, and are reached if no symbol occurs twice and no `%` is left.

    >>> i = axis_symbol(0)
    >>> bounds(3 * i + 1, {i: sympy.Integer(4)})
    (1, 10)
    """
    found = _bounds(expr, _facts(expr, sizes))
    return None if found is None else (sympy.Integer(found[0]), sympy.Integer(found[1]))


@lru_cache(maxsize=1 << 16)
def _bounds(expr: sympy.Expr, facts: Facts) -> tuple[int, int] | None:
    return _interval(expr, dict(facts))


def _interval(expr: sympy.Expr, sizes: Sizes) -> tuple[int, int] | None:
    """Interval arithmetic in Python integers, which is ten times faster than in sympy's."""
    if expr.is_Integer:
        return int(expr), int(expr)
    if expr.is_Symbol:
        size = sizes.get(expr)
        return (0, int(size) - 1) if size is not None and size.is_Integer else None
    if isinstance(expr, Mod):
        if not expr.args[1].is_Integer:
            return None
        low, high = 0, int(expr.args[1]) - 1
        part = _interval(expr.args[0], sizes)
        return part if part is not None and low <= part[0] and part[1] <= high else (low, high)
    parts = [_interval(arg, sizes) for arg in expr.args]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if expr.is_Add:
        return sum(low for low, _ in known), sum(high for _, high in known)
    if expr.is_Mul:
        low, high = 1, 1
        for part in known:
            corners = [a * b for a in (low, high) for b in part]
            low, high = min(corners), max(corners)
        return low, high
    if isinstance(expr, FloorDiv) and expr.args[1].is_Integer:
        (low, high), (divisor, _) = known
        return low // divisor, high // divisor
    if expr.is_Pow and known[0][0] >= 0 and expr.exp.is_Integer and expr.exp > 0:
        (low, high), (exponent, _) = known
        return low**exponent, high**exponent
    return None


def _expanded(expr: sympy.Expr) -> sympy.Expr:
    return expr if expr.is_Atom else sympy.expand(expr)


def within(expr: sympy.Expr, size: sympy.Expr, sizes: Sizes) -> bool:
    """Is `0 ≤ expr < size` certain?"""
    if expr == 0 or (isinstance(expr, Mod) and expr.args[1] == size):
        return True  # a divisor is positive
    if size.is_Integer:
        found = _interval(expr, sizes)
        return found is not None and found[0] >= 0 and found[1] < int(size)
    terms = _radix_terms(expr, sizes)
    if terms is None:
        return False
    ratio = _expanded(size) / _radix_extent(terms)
    return bool(ratio.is_positive and ratio.is_integer)


# Simplification -------------------------------------------------------------------------------------------------------


def simplify(expr: sympy.Expr, sizes: Sizes) -> sympy.Expr:
    """An equal expression with as few `//` and `%` as the bounds allow.

    >>> b, s = axis_symbol(0), axis_symbol(1)
    >>> sizes = {b: sympy.Integer(4), s: sympy.Integer(16)}
    >>> simplify(FloorDiv(16 * b + s, 16), sizes), simplify(Mod(16 * b + s, 16), sizes)
    (i0, i1)
    >>> simplify(8 * FloorDiv(s, 8) + Mod(s, 8), sizes)
    i1
    """
    return _simplified(expr, _facts(expr, sizes)) if _has_digits(expr) else expr


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
    return _recompose(rebuilt, sizes) if rebuilt.is_Add else rebuilt


def _split_multiple(expr: sympy.Expr, of: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """`(q, r)` with `expr = q·of + r`, taking into q every term that is a multiple of `of`."""
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
    """What some term of `rest` and `b` have in common, greatest first; each divides `b`."""
    found: set[sympy.Expr] = set()
    number, symbols = b.as_coeff_Mul()
    for term in sympy.Add.make_args(rest):
        coefficient, factor = term.as_coeff_Mul()
        shared = set(sympy.Mul.make_args(factor)).intersection(sympy.Mul.make_args(symbols))
        found.add(sympy.Mul(math.gcd(int(coefficient), int(number)), *shared))
    return sorted(found - {ONE}, key=lambda g: (-len(symbols_of(g)), -int(g.as_coeff_Mul()[0]), str(g)))


def _simplify_floordiv(a: sympy.Expr, b: sympy.Expr, sizes: Sizes) -> sympy.Expr:
    quotient, rest = _split_multiple(a, b)
    if within(rest, b, sizes):
        return quotient
    if b.is_Integer and (found := _interval(rest, sizes)) and found[0] // int(b) == found[1] // int(b):
        return quotient + found[0] // int(b)
    if isinstance(rest, Mod) and b.is_Integer and rest.args[1].is_Integer and rest.args[1] % b == 0:
        return quotient + simplify(Mod(FloorDiv(rest.args[0], b), rest.args[1] // b), sizes)
    for g in _common_factors(rest, b):  # (g·x + y) // (g·c) = x // c when 0 ≤ y < g
        inner, small = _split_multiple(rest, g)
        if inner != 0 and within(small, g, sizes):
            return quotient + _simplify_floordiv(inner, b / g, sizes)
    return quotient + FloorDiv(rest, b)


def _simplify_mod(a: sympy.Expr, b: sympy.Expr, sizes: Sizes) -> sympy.Expr:
    _, rest = _split_multiple(a, b)
    if within(rest, b, sizes):
        return rest
    if b.is_Integer:
        if (found := _interval(rest, sizes)) and found[0] // int(b) == found[1] // int(b):
            return rest - found[0] // int(b) * b
        reduced = sympy.Add(*(_reduce_term(term, b) for term in sympy.Add.make_args(rest)))
        if reduced != rest:
            return _simplify_mod(reduced, b, sizes)
    for g in _common_factors(rest, b):  # (g·x + y) % (g·c) = g·(x % c) + y when 0 ≤ y < g
        inner, small = _split_multiple(rest, g)
        if inner != 0 and within(small, g, sizes):
            return sympy.expand_mul(g * _simplify_mod(inner, b / g, sizes)) + small
    return Mod(rest, b)


def _reduce_term(term: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """A term equal to `term` modulo `b`: `(b + c)·x → c·x` and `c·(x % m) → c·x` where b divides c·m."""
    coefficient, factor = term.as_coeff_Mul()
    if isinstance(factor, Mod) and factor.args[1].is_Integer and coefficient * factor.args[1] % b == 0:
        factor = factor.args[0]
    sign = 1 if coefficient > 0 else -1
    return sign * (abs(coefficient) % b) * factor


def _recompose(total: sympy.Add, sizes: Sizes) -> sympy.Expr:
    """`c·b·(a // b) + c·(a % b) → c·a`, until nothing changes."""
    terms = set(total.args)
    for term in total.args:
        for mod in (f for f in sympy.Mul.make_args(term.as_coeff_Mul()[1]) if isinstance(f, Mod)):
            a, b = mod.args
            scale = term / mod
            partner = sympy.expand_mul(scale * b * _simplify_floordiv(a, b, sizes))
            parts = sympy.Add.make_args(partner)
            if term not in parts and terms.issuperset(parts):
                left = terms.difference(parts, {term})
                return simplify(sympy.Add(*left, sympy.expand_mul(scale * a)), sizes)
    return total


# Substitution ---------------------------------------------------------------------------------------------------------


def substitute(root: Expr, axes: AxisMap, sizes: Sizes) -> Expr:
    """`root` with axis symbols replaced; an axis may be replaced by a loaded value (a gather).

    `sizes` are the bounds of the symbols that appear in the replacements; they are used to simplify.
    """
    return substitute_all([root], axes, sizes)[0]


def substitute_all(roots: Sequence[Expr], axes: AxisMap, sizes: Sizes) -> list[Expr]:
    """`substitute` on several roots that share parts."""
    if all(symbol is value or symbol == value for symbol, value in axes.items()):
        return list(roots)
    memo: dict[sympy.Expr, Index] = {}

    def replace(index: sympy.Expr) -> Index:
        if index not in memo:
            memo[index] = replace_axes(index, axes, sizes)
        return memo[index]

    def rule(node: Expr) -> Expr | None:
        if isinstance(node, Load):
            index = tuple(i if isinstance(i, Expr) else replace(i) for i in node.index)
            if all(new is old for new, old in zip(index, node.index, strict=True)):
                return None
            return Load(node.buffer, index, node.dtype, node.mask)
        if isinstance(node, IndexValue):
            found = replace(node.index)
            return make_cast(found, node.dtype) if isinstance(found, Expr) else IndexValue(found, node.dtype)
        if isinstance(node, Random):
            found = replace(node.offset)
            assert not isinstance(found, Expr), "a random number cannot be read at a gathered position"
            return Random(node.kind, node.seed, found)
        return None

    return rewrite(roots, rule)


def replace_axes(index: sympy.Expr, axes: AxisMap, sizes: Sizes) -> Index:
    """`index` with symbols replaced.  Becomes an `Expr` as soon as one replacement is one."""
    found = {s: axes[s] for s in symbols_of(index) if s in axes}
    if any(isinstance(value, Expr) for value in found.values()):
        return _lift(index, found, sizes)
    return simplify(index.xreplace(found) if found else index, sizes)


def as_expr(index: Index) -> Expr:
    """An index as an int64 expression."""
    return index if isinstance(index, Expr) else IndexValue(index)


def _lift(index: sympy.Expr, axes: AxisMap, sizes: Sizes) -> Expr:
    """`index` as an int64 expression: sympy's operators become scalar operations above a replaced axis."""
    if index.is_Symbol:
        return as_expr(axes.get(index, index))
    if not any(isinstance(axes.get(s), Expr) for s in symbols_of(index)):
        return as_expr(replace_axes(index, axes, sizes))
    names = {sympy.Add: "add", sympy.Mul: "mul", sympy.Pow: "mul", FloorDiv: "floordiv", Mod: "remainder"}
    name = names[index.func]
    args = (index.base,) * int(index.exp) if index.is_Pow else index.args
    result, *others = (_lift(arg, axes, sizes) for arg in args)
    for other in others:
        result = Op(name, (result, other), torch.int64)
    return result


# Structure of index maps ----------------------------------------------------------------------------------------------


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

    Each expression must be a mixed-radix number of whole axes (or an axis must be spread over several expressions as
    its digits), which is what reshapes, transposes and splits produce, or such a number counted from the other end.

    >>> b, s, n = (axis_symbol(k) for k in range(3))
    >>> v, w = sympy.symbols("v w", integer=True, nonnegative=True)
    >>> sizes = {b: sympy.Integer(2), s: sympy.Integer(4), n: sympy.Integer(8)}
    >>> found = invert([4 * b + s, n], [v, w], [sympy.Integer(8), sympy.Integer(8)], [b, s, n], sizes)
    >>> found.axes[b], found.axes[s], found.axes[n], found.free
    (v//4, Mod(v, 4), w, ())
    """
    single: dict[sympy.Symbol, sympy.Expr] = {axis: ZERO for axis in axes if sizes[axis] == 1}
    solved: dict[sympy.Symbol, sympy.Expr] = {}
    digits: dict[sympy.Symbol, dict[sympy.Expr, tuple[sympy.Expr, sympy.Expr]]] = {}  # divisor: (size, value)
    for expr, value, extent in zip(exprs, values, value_sizes, strict=True):
        used = symbols_of(expr)
        solved.update((axis, ZERO) for axis in used if axis in single)
        expr = simplify(expr.xreplace(single) if single else expr, sizes)
        terms = _radix_terms(expr, sizes)
        place: sympy.Expr = value
        if terms is None:  # of a flipped tensor
            terms, place = _radix_terms(simplify(extent - 1 - expr, sizes), sizes), extent - 1 - value
        if terms is None or _radix_extent(terms) != _expanded(extent):
            return None
        weight: sympy.Expr = ONE
        for term in terms:
            digit = FloorDiv(place, weight)
            weight = weight * term.size
            if term is not terms[-1]:
                digit = Mod(digit, term.size)
            if term.divisor in digits.setdefault(term.axis, {}):
                return None
            digits[term.axis][term.divisor] = (term.size, digit)
    for axis, parts in digits.items():
        weight, total = ONE, ZERO
        while weight in parts:
            size, digit = parts.pop(weight)
            total += weight * digit
            weight = _expanded(weight * size)
        if parts or weight != _expanded(sizes[axis]):
            return None
        solved[axis] = total
    return Inverse(solved, tuple(a for a in axes if a not in solved))


@dataclass(frozen=True, slots=True)
class _Digit:
    """`(axis // divisor) % size`, a whole axis or a digit of one."""

    axis: sympy.Symbol
    divisor: sympy.Expr
    size: sympy.Expr


def _radix_terms(expr: sympy.Expr, sizes: Sizes) -> tuple[_Digit, ...] | None:
    """`expr` as a mixed-radix number, least significant digit first; None if it has another form."""
    return _radix(expr, _facts(expr, sizes))


def _radix_extent(terms: Sequence[_Digit]) -> sympy.Expr:
    """How many values a mixed-radix number takes: it runs over all of `[0, extent)`."""
    return _expanded(sympy.Mul(*(term.size for term in terms)))


@lru_cache(maxsize=1 << 16)
def _radix(expr: sympy.Expr, facts: Facts) -> tuple[_Digit, ...] | None:
    sizes = dict(facts)
    weights: dict[_Digit, sympy.Expr] = {}
    for term in sympy.Add.make_args(_expanded(expr)):
        if term == 0:
            continue
        factors = [f for f in sympy.Mul.make_args(term) if f in sizes or isinstance(f, (FloorDiv, Mod))]
        digit = _digit(factors[0], sizes) if len(factors) == 1 else None
        if digit is None:
            return None
        weights[digit] = weights.get(digit, ZERO) + term / factors[0]
    weight, ordered = ONE, []
    while weights:
        found = [digit for digit, scale in weights.items() if scale == weight]
        if not found:
            return None
        digit = min(found, key=lambda d: d.size != 1)  # of several with this weight all but the last have size 1
        del weights[digit]
        ordered.append(digit)
        weight = _expanded(weight * digit.size)
    return tuple(ordered)


def _digit(factor: sympy.Expr, sizes: Sizes) -> _Digit | None:
    size: sympy.Expr | None = None
    divisor: sympy.Expr = ONE
    if isinstance(factor, Mod):
        factor, size = factor.args
    if isinstance(factor, FloorDiv):
        factor, divisor = factor.args
    if factor not in sizes:
        return None
    if size is None:
        size = sizes[factor] / divisor
        if not size.is_integer:
            return None
    return _Digit(factor, divisor, size)


def split_points(exprs: Iterable[sympy.Expr], axis: sympy.Symbol, size: sympy.Expr) -> list[int]:
    """The divisors at which `axis` must be split so that no expression needs `//` or `%` of it; ascending.

    Empty when nothing to split, or when the divisors do not form a chain that divides `size`.
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


def flatten(index: Sequence[Index], strides: Sequence[sympy.Expr], sizes: Sizes) -> Index:
    """The offset in elements of a multi-dimensional index."""
    plain: sympy.Expr = ZERO
    indirect: list[Expr] = []
    for position, stride in zip(index, strides, strict=True):
        step = where_there_are_elements(stride)
        if isinstance(position, Expr):
            scaled = position if step == 1 else Op("mul", (position, IndexValue(step)), torch.int64)
            if not (isinstance(position, Const) and position.value == 0):
                indirect.append(scaled)
        else:
            plain += position * step
    plain = simplify(sympy.expand_mul(plain), sizes)
    if not indirect:
        return plain
    total: Expr = indirect[0]
    for part in indirect[1:]:
        total = Op("add", (total, part), torch.int64)
    return total if plain == 0 else Op("add", (total, IndexValue(plain)), torch.int64)


def coefficient(expr: sympy.Expr, axis: sympy.Symbol) -> sympy.Expr | None:
    """The stride of `axis` in an affine offset; None where the axis appears under `//`, `%` or a power.

    >>> i, j = axis_symbol(0), axis_symbol(1)
    >>> coefficient(12 * i + j, i), coefficient(12 * i + j, axis_symbol(2)), coefficient(FloorDiv(i, 2), i)
    (12, 0, None)
    """
    found: sympy.Expr = ZERO
    if axis not in symbols_of(expr):
        return found
    for term in sympy.Add.make_args(sympy.expand_mul(expr)):
        if axis in symbols_of(term):
            ratio = ONE if term is axis else term / axis
            if axis in symbols_of(ratio):
                return None
            found += ratio
    return found


__all__ = [
    "ONE",
    "ZERO",
    "FloorDiv",
    "Inverse",
    "Mod",
    "Sizes",
    "as_expr",
    "axis_symbol",
    "bounds",
    "coefficient",
    "flatten",
    "invert",
    "over_symbol",
    "replace_axes",
    "simplify",
    "split_points",
    "substitute",
    "substitute_all",
    "symbols_of",
    "within",
]
