"""Simplifies positions: integers computed from indices alone, and comparisons that their bounds decide.

Input: expressions and the sizes of their axes; output: equal ones in which a sum of positions is one index, and
comparisons that the bounds of the axes decide are constants: in `torch.arange(n) + past`, differences of neighbouring
elements, and masks computed from these; also where they are computed as floats, exactly (`exact_floats.py`).  A chosen
position (`cat`, `where`) is examined case by case, each under its own condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import sympy
import torch

from fusion.lowering.algebra.conditions import conjuncts, negated, simpler
from fusion.lowering.algebra.exact_floats import truncated
from fusion.lowering.indexing import Sizes, simplify, symbols_of, within
from fusion.lowering.indexing.intervals import expanded, interval
from fusion.lowering.ir.expr import (
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    const,
    make_cast,
    position,
    postorder,
    rewrite,
)
from fusion.lowering.ir.scalar_ops import SCALAR_OPS, ScalarName
from fusion.lowering.ir.sizes import may_be_empty

MOST_CASES = 16
"""The largest number of cases that are examined together."""
LARGEST_POSITION = 1 << 31
"""Larger numbers and multiples of axes do not count as positions: sums of them might overflow 64 bits."""
FREE = 8
"""Largest cost (in additions) of a position or a condition on positions that each reader recomputes."""

_TRUE = const(True, torch.bool)

Range = tuple[float, float]
"""The least and greatest value; infinite if unknown."""

_TRUTHS: Mapping[ScalarName, Callable[[float, float], bool | None]] = {
    # from the bounds of the difference of both operands: true, false, or undecided
    "lt": lambda low, high: True if high < 0 else False if low >= 0 else None,
    "le": lambda low, high: True if high <= 0 else False if low > 0 else None,
    "gt": lambda low, high: True if low > 0 else False if high <= 0 else None,
    "ge": lambda low, high: True if low >= 0 else False if high < 0 else None,
    "eq": lambda low, high: True if low == high == 0 else False if low > 0 or high < 0 else None,
    "ne": lambda low, high: True if low > 0 or high < 0 else False if low == high == 0 else None,
}


def simplify_all(roots: Sequence[Expr], sizes: Sizes) -> list[Expr]:
    """Simplify `roots`: sums of positions become one index each, conditions and checks that bounds decide disappear.

    >>> i = sympy.Symbol("i0", integer=True, nonnegative=True)
    >>> later = Op("add", (IndexValue(i), const(1, torch.int64)), torch.int64)
    >>> simplify_all([later, Op("lt", (later, const(1, torch.int64)), torch.bool)], {i: sympy.Integer(8)})
    [IndexValue(index=i0 + 1, dtype=torch.int64), Const(value=False, dtype=torch.bool)]
    """
    return rewrite(roots, lambda node: simplify_step(node, sizes))


def simplify_step(node: Expr, sizes: Sizes) -> Expr | None:
    """Simplify `node` by one step, over operands that are simplified already; None if no step applies."""
    return _step(node, sizes) or simpler(node)


def is_free(expr: Expr) -> bool:
    """Return whether this is a position, or a condition on positions, that any reader may as well recompute."""
    if expr.dtype not in (torch.int64, torch.bool):
        return False
    work = 0
    for node in postorder(expr):
        if not isinstance(node, (Const, IndexValue, Op)) or (isinstance(node, Op) and node.name == "checked"):
            return False
        work += SCALAR_OPS[node.name].cost if isinstance(node, Op) else 0
    return work <= FREE


def _step(node: Expr, sizes: Sizes) -> Expr | None:
    """Simplify a node by the bounds of positions, over simplified operands; None if nothing applies."""
    if isinstance(node, Cast) and isinstance(node.arg, Const) and not node.arg.dtype.is_floating_point:
        return make_cast(node.arg, node.dtype)
    if isinstance(node, Load):
        index = tuple(_index(i, node.mask) for i in node.index)
        return None if index == node.index else Load(node.buffer, index, node.dtype, node.mask)
    if isinstance(node, Cast) and node.dtype is torch.int64 and node.arg.dtype.is_floating_point:
        whole = truncated(node.arg, sizes)
        return None if whole is None else position(whole)
    if not isinstance(node, Op):
        return None
    if node.name == "checked":
        return _unchecked(node, sizes)
    if node.name == "remainder" and _is_its_remainder(node):
        return node.args[0]
    if node.name in _TRUTHS:
        return _decided(node, sizes)
    if node.dtype is torch.int64 and node.name in ("abs", "maximum", "minimum"):
        return _bounded(node, sizes)
    if node.dtype is torch.int64 and node.name in ("add", "sub", "neg", "mul"):
        numbers = [number for arg in node.args if (number := _position(arg)) is not None]
        result = _computed(node.name, numbers) if len(numbers) == len(node.args) else None
        return None if result is None else position(simplify(result, sizes))
    return None


def _index(index: Expr | sympy.Expr, mask: Expr | None) -> Expr | sympy.Expr:
    """Simplify an index of a load, which is evaluated where its mask holds alone: a choice by that mask is decided."""
    holds = () if mask is None else tuple(conjuncts(mask))
    while isinstance(index, Op) and index.name == "where" and index.args[0] in holds:
        index = index.args[1]
    return index.index if isinstance(index, IndexValue) and index.dtype is torch.int64 else index


def _unchecked(node: Op, sizes: Sizes) -> Expr | None:
    """Drop the check of a position that is known to be in range."""
    index, last = _position(node.args[0]), _position(node.args[2])
    if last is None or may_be_empty(last + 1):
        return None
    if index is None:
        low, high = clamped(node.args[0])
        is_inside = low is not None and low >= 0 and high is not None and last.is_Integer and high <= last
        return node.args[0] if is_inside else None
    return node.args[0] if within(index, last + 1, sizes) else None


def _is_its_remainder(node: Op) -> bool:
    """Return whether a clamped integer is its own remainder."""
    (low, high), (_, last) = clamped(node.args[0]), clamped(node)
    return low is not None and low >= 0 and high is not None and last is not None and high <= last


def clamped(node: Expr) -> tuple[int | None, int | None]:
    """Return the least and the greatest value that clamps leave an integer, whatever it is; None for one not known.

    >>> low, high = (const(number, torch.int64) for number in (0, 15))
    >>> place = Op("maximum", (low, Load("places", (), torch.int64)), torch.int64)
    >>> clamped(Op("minimum", (high, place), torch.int64))
    (0, 15)
    """
    if isinstance(node, Const) and not node.dtype.is_floating_point:
        return int(node.value), int(node.value)
    if not isinstance(node, Op) or node.name not in ("minimum", "maximum", "remainder") or node.dtype.is_floating_point:
        return None, None
    if node.name == "remainder":
        divisor, _ = clamped(node.args[1])
        known = isinstance(node.args[1], Const) and divisor is not None and divisor > 0
        return (0, divisor - 1) if known and divisor is not None else (None, None)
    (low, high), (other_low, other_high) = map(clamped, node.args)
    lows = [each for each in (low, other_low) if each is not None]
    highs = [each for each in (high, other_high) if each is not None]
    if node.name == "minimum":
        return (min(lows) if len(lows) == 2 else None), min(highs, default=None)
    return max(lows, default=None), (max(highs) if len(highs) == 2 else None)


def _position(expr: Expr) -> sympy.Expr | None:
    """Return the index that an expression stands for, if it is a position."""
    if isinstance(expr, IndexValue) and expr.dtype is torch.int64:
        return expr.index
    if isinstance(expr, Const) and expr.dtype is torch.int64 and abs(int(expr.value)) < LARGEST_POSITION:
        return sympy.Integer(int(expr.value))
    return None


def _computed(name: str, args: Sequence[sympy.Expr]) -> sympy.Expr | None:
    """Return a sum, difference or multiple of positions, if its factors are small enough."""
    if name == "mul" and not any(arg.is_Integer for arg in args):
        return None
    first, second = (sympy.Integer(0), *args) if name == "neg" else args
    result = expanded(first * second if name == "mul" else first + second if name == "add" else first - second)
    return result if all(abs(factor) < LARGEST_POSITION for factor in result.as_coefficients_dict().values()) else None


def _bounded(node: Op, sizes: Sizes) -> Expr | None:
    """Return an absolute value, maximum or minimum as the operand that the bounds of all axes decide on."""
    first, second = (*node.args, const(0, torch.int64))[:2]
    above, below = (_decided(Op(name, (first, second), torch.bool), sizes) for name in ("ge", "le"))
    is_above = above == _TRUE
    if not is_above and below != _TRUE:
        return None
    if node.name != "abs":
        return first if is_above is (node.name == "maximum") else second
    place = _position(first)
    return None if place is None else position(simplify(place if is_above else expanded(-place), sizes))


# Comparisons ----------------------------------------------------------------------------------------------------------

_Case = tuple[tuple[Expr, ...], sympy.Expr]
"""The conditions of a case, and the position in it."""


def decided_within(node: Op, sizes: Sizes, within: Mapping[sympy.Symbol, Range]) -> Expr | None:
    """Return a comparison of positions as a constant, if it has the same truth value wherever axes are in ranges."""
    return _decided(node, sizes, within) if node.name in _TRUTHS else None


def ranges_of(sizes: Sizes) -> dict[sympy.Symbol, Range]:
    """Return the range of each axis: from 0 to its size less one."""
    return {symbol: (0.0, int(size) - 1.0 if size.is_Integer else math.inf) for symbol, size in sizes.items()}


def narrowed(within: Mapping[sympy.Symbol, Range], conditions: Sequence[Expr]) -> dict[sympy.Symbol, Range] | None:
    """Return the ranges of axes under all conditions; None if these exclude each other."""
    ranges = dict(within)
    for condition in conditions:
        for part in conjuncts(condition):
            if isinstance(part, Const):
                if not part.value:
                    return None
                continue
            for symbol, (low, high) in _bounds_from(part):
                least, most = ranges.get(symbol, (-math.inf, math.inf))
                ranges[symbol] = max(low, least), min(high, most)
    return None if any(low > high for low, high in ranges.values()) else ranges


def _decided(node: Op, sizes: Sizes, within: Mapping[sympy.Symbol, Range] | None = None) -> Expr | None:
    """Return a comparison of positions as a constant, if it has the same truth value in all cases."""
    within = ranges_of(sizes) if within is None else within
    known: dict[Expr, list[_Case] | None] = {}
    first, second = (_cases(arg, known) for arg in node.args)
    if first is None or second is None or len(first) * len(second) > MOST_CASES:
        return None
    truths: set[bool | None] = set()
    for (held, a), (also, b) in product(first, second):
        ranges = narrowed(within, (*held, *also))
        if ranges is not None:
            truths.add(_TRUTHS[node.name](*_range(expanded(a - b), ranges)))
    truth = truths.pop() if len(truths) == 1 else None
    return None if truth is None else const(truth, torch.bool)


def _cases(expr: Expr, known: dict[Expr, list[_Case] | None]) -> list[_Case] | None:
    """Return the cases of a number, each under its conditions; None if it is computed from more than positions."""
    if expr not in known:
        known[expr] = _new_cases(expr, known)
    return known[expr]


def _new_cases(expr: Expr, known: dict[Expr, list[_Case] | None]) -> list[_Case] | None:
    place = _position(expr)
    if place is not None:
        return [((), place)]
    if not isinstance(expr, Op) or expr.dtype is not torch.int64:
        return None
    if expr.name == "where":
        condition, *arms = expr.args
        sides = [side for arm in arms if (side := _cases(arm, known)) is not None]
        if len(sides) < len(arms) or sum(map(len, sides)) > MOST_CASES:
            return None
        both = zip((condition, negated(condition)), sides, strict=True)
        return [((holds, *held), number) for holds, side in both for held, number in side]
    if expr.name not in ("add", "sub", "neg", "mul"):
        return None
    parts = [part for arg in expr.args if (part := _cases(arg, known)) is not None]
    if len(parts) < len(expr.args) or math.prod(map(len, parts)) > MOST_CASES:
        return None
    cases: list[_Case] = []
    for choice in product(*parts):
        number = _computed(expr.name, [place for _, place in choice])
        if number is None:
            return None
        cases.append((tuple(condition for held, _ in choice for condition in held), number))
    return cases


def _bounds_from(condition: Expr) -> Iterator[tuple[sympy.Symbol, Range]]:
    """Yield the range of an axis that a comparison of it with a number implies; nothing for other conditions."""
    if not isinstance(condition, Op) or condition.name not in _TRUTHS or condition.name == "ne":
        return
    places = [_position(arg) for arg in condition.args]
    if places[0] is None or places[1] is None:
        return
    difference = expanded(places[0] - places[1])
    symbols = difference.free_symbols
    if len(symbols) != 1:
        return
    (symbol,) = symbols
    offset = difference - symbol
    if not offset.is_Integer:
        return
    zero = -int(offset)  # where both are equal
    yield (
        symbol,
        {
            "lt": (-math.inf, zero - 1),
            "le": (-math.inf, zero),
            "gt": (zero + 1, math.inf),
            "ge": (zero, math.inf),
            "eq": (zero, zero),
        }[condition.name],
    )


def _range(number: sympy.Expr, ranges: Mapping[sympy.Symbol, Range]) -> Range:
    """Return the bounds of a sum of multiples of axes, and of their quotients; infinite for anything else."""
    low = high = 0.0
    for term, factor in number.as_coefficients_dict().items():
        if not factor.is_Integer:
            return -math.inf, math.inf
        if term == 1:
            ends: Range = (1.0, 1.0)
        elif isinstance(term, sympy.Symbol) and term in ranges:
            ends = ranges[term]
        elif (limits := _limits(term, ranges)) is not None:
            ends = limits
        else:
            return -math.inf, math.inf
        ends = (ends[0] * int(factor), ends[1] * int(factor))
        low, high = low + min(ends), high + max(ends)
    return low, high


def _limits(term: sympy.Expr, ranges: Mapping[sympy.Symbol, Range]) -> Range | None:
    """Return the bounds of a term over axes of known ranges, taken to begin at 0; None where they are not known."""
    sizes = {}
    for symbol in symbols_of(term):
        low, high = ranges.get(symbol, (-math.inf, math.inf))
        if low < 0 or high == math.inf:
            return None
        sizes[symbol] = sympy.Integer(int(high) + 1)
    return interval(term, sizes)
