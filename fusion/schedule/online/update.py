"""Computes the corrections of accumulators when the running value they depend on changes.

Input: the parts that shift an exponent or a factor under a fold; output: the `carry` of the fold, and its arguments
with a safe replacement for a running value at its identity.

The factor of exp(a(x) - d) is exp(d′ - d), where d′ is the value before the block: exactly 1 where d has not changed,
also at infinity.  While an extreme value d is still at its identity, only elements that change nothing were added;
there exp(a(x) - d) would be NaN, and any finite value may replace d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from fusion.lowering.ir.expr import Expr, Op, TileRef, const, make_cast, make_op, rewrite
from fusion.lowering.ir.kernel import Fold
from fusion.lowering.ir.scalar_ops import identity
from fusion.schedule.online.terms import ExponentialFactor, RangePart, add_all


@dataclass(frozen=True, slots=True)
class Start:
    """The treatment of a running value at its identity.

    `stand_in` replaces it, None for no replacement.  `held`: carried values do not change when it leaves its identity.
    """

    stand_in: float | None
    held: bool


STARTS = tuple(Start(stand_in, held) for stand_in in (None, 0.0, 1.0) for held in (False, True))
"""The simplest first."""


class Update:
    """Carries and safe arguments, with the treatment of each running value at its identity in `starts`."""

    def __init__(self, running: Mapping[str, Fold], starts: Mapping[TileRef, Start]) -> None:
        self.running, self.starts = running, starts

    def safe(self, exprs: Sequence[Expr]) -> tuple[Expr, ...]:
        """Replace running values in `exprs` by their stand-ins where they are still at their identities."""

        def rule(node: Expr) -> Expr | None:
            start = self.starts.get(node) if isinstance(node, TileRef) else None
            if start is None or start.stand_in is None:
                return None
            return make_op("where", self.at_identity(node), const(start.stand_in, node.dtype), node)

        return tuple(rewrite(exprs, rule))

    def at_identity(self, ref: Expr) -> Expr:
        """Return whether a running value, or the one before the block, is still at its identity."""
        assert isinstance(ref, TileRef)
        fold = self.running[ref.name]
        return make_op("eq", ref, const(identity(fold.op, fold.dtype), fold.dtype))

    def before(self, expr: Expr) -> Expr:
        """Return `expr` with the values before the block."""
        return rewrite([expr], lambda n: TileRef(n.name, n.dtype, True) if isinstance(n, TileRef) else None)[0]

    def carry(
        self, fold: Fold, ranges: Sequence[ExponentialFactor], shift: Sequence[RangePart] = (), base: Fold | None = None
    ) -> Expr:
        """Return the corrected value before the block; `base` is the same fold without the shifted factor."""
        value = fold.before
        if shift:
            assert base is not None
            change = add_all([(self._unless_same(part, self._change(part), 0.0, True), False) for part in shift])
            value = make_op("add", value, make_op("mul", base.before, make_cast(change, fold.dtype)))
        for each in ranges:
            value = make_op("mul", value, make_cast(self._factor(each), fold.dtype))
        return value

    def _factor(self, each: ExponentialFactor) -> Expr:
        """Return the exponential of the change of the parts, each guarded alone."""
        dtype = each.parts[0].value.dtype
        if len(each.parts) == 1:
            part = each.parts[0]
            return self._unless_same(part, Op(each.function, (self._change(part),), dtype), 1.0)
        changes = [(self._unless_same(part, self._change(part), 0.0), False) for part in each.parts]
        return Op(each.function, (add_all(changes),), dtype)

    def _change(self, part: RangePart) -> Expr:
        """Return the change of a part."""
        pair = (part.value, self.before(part.value))
        change = make_op("sub", *(reversed(pair) if part.negative else pair))
        return change if part.scale is None else make_op("mul", change, part.scale)

    def _unless_same(self, part: RangePart, change: Expr, still: float, held: bool = False) -> Expr:
        """Return `change`, or `still` if the running values are unchanged, or were at their identity and `held`."""
        refs = refs_of([part])
        unchanged = const(still, change.dtype)
        same = [make_op("eq", self.before(ref), ref) for ref in refs]
        value = make_op("where", reduce(lambda one, other: make_op("and", one, other), same), unchanged, change)
        for ref in refs:
            if held or self.starts[ref].held:
                value = make_op("where", self.at_identity(self.before(ref)), unchanged, value)
        return value


def refs_of(parts: Sequence[RangePart]) -> list[TileRef]:
    """Return the running values in `parts`, each once."""
    refs: dict[TileRef, None] = {}
    stack: list[Expr] = [part.value for part in reversed(parts)]
    seen: set[Expr] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, TileRef):
            refs[node] = None
        stack.extend(reversed(node.children()))
    return list(refs)
