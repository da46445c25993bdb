"""Decides conditions on positions by the choices around them.

`where(i < 3, where(i < 5, a, b), c)` never is b, and a load that is masked by `i >= 3` gives 0 in its first arm.  Such
nests come from writes to parts of a tensor, one after the other, that copy from each other (circular padding), and from
concatenations of concatenations.  Input: expressions and the sizes of their axes; output: equal ones, to the bit.
An arm that is never chosen disappears with its loads, unless it checks an index, as eager does.

Masks of loads hold by themselves, also where a target evaluates both arms of a choice: the conditions around a load
never shorten its mask, they only tell whether it is read; except where the same element is read without a mask anyway,
as the position at which an image is sampled, which decides whether it is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import sympy

from fusion.lowering.algebra.conditions import negated, simpler
from fusion.lowering.algebra.positions import Range, decided_within, narrowed, ranges_of
from fusion.lowering.indexing import Sizes
from fusion.lowering.ir.expr import Const, Expr, Load, Op, const, loads, postorder
from fusion.lowering.ir.scalar_ops import CHECKED

MOST = 5000
"""The most expressions, each under its conditions, that are examined; beyond, all stay as they are."""

DEEPEST = 150
"""The deepest nest that is examined."""

_Ranges: TypeAlias = Mapping[sympy.Symbol, Range]
_Held: TypeAlias = frozenset[Expr]


def simplify_implied(roots: Sequence[Expr], sizes: Sizes) -> list[Expr]:
    """Simplify `roots`: choices that the choices around them decide disappear.

    >>> from torch import bool as boolean, float32, int64
    >>> from fusion.lowering.ir.expr import IndexValue
    >>> i = sympy.Symbol("i0", integer=True, nonnegative=True)
    >>> less = [Op("lt", (IndexValue(i), const(n, int64)), boolean) for n in (3, 5)]
    >>> a, b, c = (Load(name, (i,), float32) for name in "abc")
    >>> inner = Op("where", (less[1], a, b), float32)
    >>> (root,) = simplify_implied([Op("where", (less[0], inner, c), float32)], {i: sympy.Integer(8)})
    >>> root.args[1] is a
    True
    """
    choosing = _nested(roots)
    if not choosing:
        return list(roots)
    try:
        simplifier = _Simplifier(roots, choosing, sizes)
        return [simplifier.value(root, simplifier.start, frozenset(), 0) for root in roots]
    except _TooMany:
        return list(roots)


def is_implied(condition: Expr, given: Sequence[Expr], sizes: Sizes) -> bool:
    """Return whether a condition on positions holds wherever all of `given` do.

    >>> from torch import bool as boolean, int64
    >>> from fusion.lowering.ir.expr import IndexValue
    >>> i = sympy.Symbol("i0", integer=True, nonnegative=True)
    >>> less = [Op("lt", (IndexValue(i), const(n, int64)), boolean) for n in (3, 5)]
    >>> is_implied(less[1], [less[0]], {i: sympy.Integer(8)}), is_implied(less[0], [less[1]], {i: sympy.Integer(8)})
    (True, False)
    """
    ranges = narrowed(ranges_of(sizes), given)
    if ranges is None:
        return True
    return all(part in given or _decided(part, sizes, ranges) for part in _terms(condition))


def _decided(part: Expr, sizes: Sizes, ranges: _Ranges) -> bool:
    decided = decided_within(part, sizes, ranges) if isinstance(part, Op) else part
    return isinstance(decided, Const) and bool(decided.value)


def _terms(condition: Expr) -> list[Expr]:
    """Return the conditions that `and` joins."""
    if not isinstance(condition, Op) or condition.name != "and":
        return [condition]
    return [term for arg in condition.args for term in _terms(arg)]


class _TooMany(Exception):
    """There are more expressions than are examined."""


def _nested(roots: Sequence[Expr]) -> frozenset[Expr]:
    """Return the expressions that contain a choice or a masked load; none unless some are within others."""
    found: set[Expr] = set()
    nests = False
    for node in postorder(*roots):
        within = any(child in found for child in node.children())
        own = (isinstance(node, Op) and node.name == "where") or (isinstance(node, Load) and node.mask is not None)
        nests = nests or (own and within)
        if own or within:
            found.add(node)
    return frozenset(found) if nests else frozenset()


class _Simplifier:
    """Simplifies expressions under ranges of their axes, and under conditions that hold: masks of some loads."""

    def __init__(self, roots: Sequence[Expr], choosing: frozenset[Expr], sizes: Sizes) -> None:
        self.start = ranges_of(sizes)
        self._choosing, self._sizes = choosing, sizes
        self._done: dict[tuple[Expr, tuple[Range, ...], _Held], Expr] = {}
        self._checking: set[Expr] = set()
        for node in postorder(*roots):
            is_check = isinstance(node, Op) and node.name == CHECKED
            if is_check or not self._checking.isdisjoint(node.children()):
                self._checking.add(node)
        read = [*loads(*roots)]
        self._anyway = {(load.buffer, load.index): load for load in read if load.mask is None}
        twins = (load.mask for load in read if load.mask is not None and (load.buffer, load.index) in self._anyway)
        self._masks = frozenset(twins)

    def value(self, node: Expr, ranges: _Ranges, held: _Held, depth: int) -> Expr:
        """Return `node`, simplified where the axes are in these ranges and conditions hold."""
        if node not in self._choosing:
            return node
        if node in self._checking:  # of every point, also where its result is not chosen
            ranges, held = self.start, frozenset()
        key = node, tuple(ranges.values()), held
        if key not in self._done:
            if len(self._done) > MOST or depth > DEEPEST:
                raise _TooMany
            self._done[key] = self._simplified(node, ranges, held, depth + 1)
        return self._done[key]

    def _simplified(self, node: Expr, ranges: _Ranges, held: _Held, depth: int) -> Expr:
        if isinstance(node, Load):
            return self._loaded(node, ranges, held, depth)
        if isinstance(node, Op) and node.name == "where":
            return self._chosen(node, ranges, held, depth)
        rebuilt = node.rebuild([self.value(child, ranges, held, depth) for child in node.children()])
        return simpler(rebuilt) or rebuilt

    def _loaded(self, load: Load, ranges: _Ranges, held: _Held, depth: int) -> Expr:
        """Return a load with the shortest mask; 0 where that is false in these ranges."""
        if load.mask is None:
            return load.rebuild([self.value(child, ranges, held, depth) for child in load.children()])
        if load.mask in held and (load.buffer, load.index) in self._anyway:
            return self._anyway[load.buffer, load.index]
        mask = self._condition(load.mask, self.start)
        decided = self._condition(mask, ranges)
        if isinstance(decided, Const) and not decided.value and load not in self._checking:
            return const(0, load.dtype)
        if load.mask in self._checking:
            return load
        inside = self._held(load.mask, held)
        index = tuple(i if isinstance(i, sympy.Expr) else self.value(i, ranges, inside, depth) for i in load.index)
        return Load(load.buffer, index, load.dtype, None if mask == const(True, mask.dtype) else mask)

    def _held(self, condition: Expr, held: _Held) -> _Held:
        """Return the conditions that hold where `condition` does, too."""
        return held | {condition} if condition in self._masks else held

    def _chosen(self, node: Op, ranges: _Ranges, held: _Held, depth: int) -> Expr:
        """Return a choice whose arms are simplified where each is chosen, or the arm that always is."""
        condition, first, second = node.args
        if condition in self._checking:
            return node
        if condition in held and second not in self._checking:
            return self.value(first, ranges, held, depth)
        decided = self._condition(condition, ranges)
        if isinstance(decided, Const):
            taken, left = (first, second) if decided.value else (second, first)
            if left not in self._checking:
                return self.value(taken, ranges, held, depth)
            decided = condition
        arms = []
        for arm, true in ((first, decided), (second, negated(decided))):
            inside = narrowed(ranges, [true])
            also = self._held(condition, held) if arm is first else held
            arms.append(arm if inside is None else self.value(arm, inside, also, depth))
        if arms[0] is arms[1]:
            return arms[0]
        chosen = Op("where", (decided, *arms), node.dtype)
        return simpler(chosen) or chosen

    def _condition(self, node: Expr, ranges: _Ranges) -> Expr:
        """Return a condition on positions, simplified where the axes are in these ranges."""
        if not isinstance(node, Op):
            return node
        if node.name in ("and", "or"):
            first = self._condition(node.args[0], ranges)
            inside = narrowed(ranges, [first if node.name == "and" else negated(first)])
            second = node.args[1] if inside is None else self._condition(node.args[1], inside)
            rebuilt = Op(node.name, (first, second), node.dtype)
            return simpler(rebuilt) or rebuilt
        if node.name == "not":
            rebuilt = Op("not", (self._condition(node.args[0], ranges),), node.dtype)
            return simpler(rebuilt) or rebuilt
        return decided_within(node, self._sizes, ranges) or node


__all__ = ["is_implied", "simplify_implied"]
