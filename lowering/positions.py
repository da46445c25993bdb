"""Positions: integers that are made of indices alone, and what is certain of them.

Input: expressions and the sizes of their axes; output: equal ones in which a sum of positions is one index, and
comparisons that the bounds of the axes decide are constants: of `torch.arange(n) + past`, of its differences from one
element to the next, and of what masks are made of these.  Where a position is chosen (`cat`, `where`), each choice is
looked at under its own condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import sympy
import torch

from fusion.lowering.conditions import negated, simpler
from fusion.lowering.expr import Cast, Const, Expr, IndexValue, Load, Op, const, make_cast, position, postorder, rewrite
from fusion.lowering.indexing import Sizes, simplify, within
from fusion.lowering.indexing.intervals import expanded
from fusion.lowering.scalar_ops import SCALAR_OPS
from fusion.lowering.sizes import may_be_empty

MOST_CASES = 16
"""Choices that are looked at together, at most."""
LARGEST = 1 << 31
"""Beyond this, numbers and multiples of axes are no positions: what is computed of them might not fit 64 bits."""
FREE = 8
"""How much work (in additions) each reader may do to have a position or a condition on positions."""

Range = tuple[float, float]
"""The least and greatest value; infinite where it is not known."""

_TRUTHS: Mapping[str, Callable[[float, float], bool | None]] = {
    # of the bounds of a difference: true, false, or not certain
    "lt": lambda low, high: True if high < 0 else False if low >= 0 else None,
    "le": lambda low, high: True if high <= 0 else False if low > 0 else None,
    "gt": lambda low, high: True if low > 0 else False if high <= 0 else None,
    "ge": lambda low, high: True if low >= 0 else False if high < 0 else None,
    "eq": lambda low, high: True if low == high == 0 else False if low > 0 or high < 0 else None,
    "ne": lambda low, high: True if low > 0 or high < 0 else False if low == high == 0 else None,
}


def settled(roots: Sequence[Expr], sizes: Sizes) -> list[Expr]:
    """`roots` with sums of positions as one index each, without conditions and checks that bounds decide.

    >>> i = sympy.Symbol("i0", integer=True, nonnegative=True)
    >>> later = Op("add", (IndexValue(i), const(1, torch.int64)), torch.int64)
    >>> settled([later, Op("lt", (later, const(1, torch.int64)), torch.bool)], {i: sympy.Integer(8)})
    [IndexValue(index=i0 + 1, dtype=torch.int64), Const(value=False, dtype=torch.bool)]
    """
    return rewrite(roots, lambda node: settle(node, sizes))


def settle(node: Expr, sizes: Sizes) -> Expr | None:
    """`node` after one step, over operands that are settled already; None if there is none."""
    return _step(node, sizes) or simpler(node)


def is_free(expr: Expr) -> bool:
    """Is this a position, or a condition on positions, that any reader may as well compute?"""
    if expr.dtype not in (torch.int64, torch.bool):
        return False
    work = 0
    for node in postorder(expr):
        if not isinstance(node, (Const, IndexValue, Op)) or (isinstance(node, Op) and node.name == "checked"):
            return False
        work += SCALAR_OPS[node.name].cost if isinstance(node, Op) else 0
    return work <= FREE


def _step(node: Expr, sizes: Sizes) -> Expr | None:
    """A node whose arguments are as plain as they get, as a plainer one; None where it stays as it is."""
    if isinstance(node, Cast) and isinstance(node.arg, Const) and not node.arg.dtype.is_floating_point:
        return make_cast(node.arg, node.dtype)
    if isinstance(node, Load) and any(isinstance(i, IndexValue) and i.dtype is torch.int64 for i in node.index):
        index = tuple(i.index if isinstance(i, IndexValue) and i.dtype is torch.int64 else i for i in node.index)
        return Load(node.buffer, index, node.dtype, node.mask)
    if not isinstance(node, Op):
        return None
    if node.name == "checked":
        return _unchecked(node, sizes)
    if node.name in _TRUTHS:
        return _decided(node, sizes)
    if node.dtype is torch.int64 and node.name in ("add", "sub", "neg", "mul"):
        numbers = [number for arg in node.args if (number := _position(arg)) is not None]
        found = _computed(node.name, numbers) if len(numbers) == len(node.args) else None
        return None if found is None else position(simplify(found, sizes))
    return None


def _unchecked(node: Op, sizes: Sizes) -> Expr | None:
    """A checked position without the check, if it is known to be inside."""
    place, last = _position(node.args[0]), _position(node.args[2])
    if place is None or last is None or may_be_empty(last + 1) or not within(place, last + 1, sizes):
        return None
    return node.args[0]


def _position(expr: Expr) -> sympy.Expr | None:
    """The index that an expression is, if it is one."""
    if isinstance(expr, IndexValue) and expr.dtype is torch.int64:
        return expr.index
    if isinstance(expr, Const) and expr.dtype is torch.int64 and abs(int(expr.value)) < LARGEST:
        return sympy.Integer(expr.value)
    return None


def _computed(name: str, args: Sequence[sympy.Expr]) -> sympy.Expr | None:
    """A sum, a difference, or a multiple."""
    if name == "mul" and not any(arg.is_Integer for arg in args):
        return None
    first, second = (sympy.Integer(0), *args) if name == "neg" else args
    found = expanded(first * second if name == "mul" else first + second if name == "add" else first - second)
    return found if all(abs(factor) < LARGEST for factor in found.as_coefficients_dict().values()) else None


# Comparisons ----------------------------------------------------------------------------------------------------------

_Case = tuple[tuple[Expr, ...], sympy.Expr]
"""What holds, and the position that a number then is."""


def _decided(node: Op, sizes: Sizes) -> Expr | None:
    """A comparison of positions as true or false, if it is the same for all that they may be."""
    known: dict[Expr, list[_Case] | None] = {}
    first, second = (_cases(arg, known) for arg in node.args)
    if first is None or second is None or len(first) * len(second) > MOST_CASES:
        return None
    truths: set[bool | None] = set()
    for (held, a), (also, b) in product(first, second):
        ranges = _under((*held, *also), sizes)
        if ranges is not None:
            truths.add(_TRUTHS[node.name](*_range(expanded(a - b), ranges)))
    truth = truths.pop() if len(truths) == 1 else None
    return None if truth is None else const(truth, torch.bool)


def _cases(expr: Expr, known: dict[Expr, list[_Case] | None]) -> list[_Case] | None:
    """What a number may be, each under its conditions; None if it is made of anything but positions."""
    if expr not in known:
        known[expr] = _found_cases(expr, known)
    return known[expr]


def _found_cases(expr: Expr, known: dict[Expr, list[_Case] | None]) -> list[_Case] | None:
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
    found: list[_Case] = []
    for choice in product(*parts):
        number = _computed(expr.name, [place for _, place in choice])
        if number is None:
            return None
        found.append((tuple(condition for held, _ in choice for condition in held), number))
    return found


def _under(conditions: Sequence[Expr], sizes: Sizes) -> dict[sympy.Symbol, Range] | None:
    """The ranges of the axes where all conditions hold; None if they never do together."""
    ranges = {symbol: (0.0, int(size) - 1.0 if size.is_Integer else math.inf) for symbol, size in sizes.items()}
    for condition in conditions:
        if isinstance(condition, Const):
            if not condition.value:
                return None
            continue
        for symbol, (low, high) in _said(condition):
            least, most = ranges.get(symbol, (-math.inf, math.inf))
            ranges[symbol] = max(low, least), min(high, most)
    return None if any(low > high for low, high in ranges.values()) else ranges


def _said(condition: Expr) -> Iterator[tuple[sympy.Symbol, Range]]:
    """What a comparison of one axis with a number says of that axis; nothing where it says less."""
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
    """The bounds of a sum of multiples of axes; of anything else they are not known."""
    low = high = 0.0
    for term, factor in number.as_coefficients_dict().items():
        if not factor.is_Integer:
            return -math.inf, math.inf
        if term == 1:
            ends: Range = (1.0, 1.0)
        elif term in ranges:
            ends = ranges[term]
        else:
            return -math.inf, math.inf
        ends = (ends[0] * int(factor), ends[1] * int(factor))
        low, high = low + min(ends), high + max(ends)
    return low, high
