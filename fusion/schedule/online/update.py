"""How what is summed up with one running value becomes what it would be with the next one.

Input: the parts that shift an exponent or a factor under a fold; output: the `carry` of the fold, and how its arguments
read a running value that has not seen anything yet.

The factor of exp(a(x) - d) is exp(d′ - d), where d′ is the value before the block: exactly 1 where d has not changed,
also at infinity.  While an extreme value d is still at its identity, only what changes nothing has been seen; there
exp(a(x) - d) would be NaN, and any finite value does in place of d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from fusion.lowering.expr import Expr, Op, TileRef, const, make_cast, make_op, rewrite
from fusion.lowering.kernel import Fold
from fusion.lowering.scalar_ops import identity
from fusion.schedule.online.terms import Part, Range, add_all


@dataclass(frozen=True, slots=True)
class Start:
    """How the state is treated in which a running value is at its identity.

    `stand_in` is read in its place, None for itself.  `held`: what is carried does not change when it leaves.
    """

    stand_in: float | None
    held: bool


STARTS = tuple(Start(stand_in, held) for stand_in in (None, 0.0, 1.0) for held in (False, True))
"""The simplest first."""


class Update:
    """Carries and safe arguments, given the start of each running value in `starts`."""

    def __init__(self, running: Mapping[str, Fold], starts: Mapping[TileRef, Start]) -> None:
        self.running, self.starts = running, starts

    def safe(self, exprs: Sequence[Expr]) -> tuple[Expr, ...]:
        """`exprs` with stand-ins where they need them."""

        def rule(node: Expr) -> Expr | None:
            start = self.starts.get(node) if isinstance(node, TileRef) else None
            if start is None or start.stand_in is None:
                return None
            return make_op("where", self.at_identity(node), const(start.stand_in, node.dtype), node)

        return tuple(rewrite(exprs, rule))

    def at_identity(self, ref: Expr) -> Expr:
        """Is a running value, or the one before the block, still at its identity?"""
        assert isinstance(ref, TileRef)
        fold = self.running[ref.name]
        return make_op("eq", ref, const(identity(fold.op, fold.dtype), fold.dtype))

    def before(self, expr: Expr) -> Expr:
        """`expr` as it was before the block."""
        return rewrite([expr], lambda n: TileRef(n.name, n.dtype, True) if isinstance(n, TileRef) else None)[0]

    def carry(self, fold: Fold, ranges: Sequence[Range], shift: Sequence[Part] = (), base: Fold | None = None) -> Expr:
        """What the value before the block has become; `base` is the fold of the same without the shifted factor."""
        value = fold.before
        if shift:
            assert base is not None
            moved = add_all([(self._unless_same(part, self._moved(part), 0.0, True), False) for part in shift])
            value = make_op("add", value, make_op("mul", base.before, make_cast(moved, fold.dtype)))
        for each in ranges:
            value = make_op("mul", value, make_cast(self._factor(each), fold.dtype))
        return value

    def _factor(self, each: Range) -> Expr:
        """The exponential of by how much the parts have changed, each guarded alone."""
        dtype = each.parts[0].value.dtype
        if len(each.parts) == 1:
            part = each.parts[0]
            return self._unless_same(part, Op(each.function, (self._moved(part),), dtype), 1.0)
        changes = [(self._unless_same(part, self._moved(part), 0.0), False) for part in each.parts]
        return Op(each.function, (add_all(changes),), dtype)

    def _moved(self, part: Part) -> Expr:
        """By how much a part has changed."""
        pair = (part.value, self.before(part.value))
        change = make_op("sub", *(reversed(pair) if part.negative else pair))
        return change if part.scale is None else make_op("mul", change, part.scale)

    def _unless_same(self, part: Part, change: Expr, still: float, held: bool = False) -> Expr:
        """`change`, or `still` where the running values are what they were, or were at their identity and `held`."""
        refs = refs_of([part])
        quiet = const(still, change.dtype)
        same = [make_op("eq", self.before(ref), ref) for ref in refs]
        value = make_op("where", reduce(lambda one, other: make_op("and", one, other), same), quiet, change)
        for ref in refs:
            if held or self.starts[ref].held:
                value = make_op("where", self.at_identity(self.before(ref)), quiet, value)
        return value


def refs_of(parts: Sequence[Part]) -> list[TileRef]:
    """The running values in `parts`, each once."""
    found: dict[TileRef, None] = {}
    stack: list[Expr] = [part.value for part in reversed(parts)]
    seen: set[Expr] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, TileRef):
            found[node] = None
        stack.extend(reversed(node.children()))
    return list(found)
