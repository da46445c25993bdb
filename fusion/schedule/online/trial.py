"""An online form is tried on numbers before it is given away.

Input: a fold, the folds that run beside it, and an online form of it; output: whether the form gives the same: at any
running values, from one to the next, and while a running value is still at its identity.  A fold of one element stands
for a fold of many, as all that is claimed holds for each element alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Protocol

import torch

from fusion.lowering import folds
from fusion.lowering.expr import Expr, Random, TileRef, postorder
from fusion.lowering.kernel import Fold
from fusion.lowering.scalar_ops import identity
from fusion.schedule.online.merge import merged_op
from fusion.schedule.online.sample import Source, Values, evaluate, leaves, rank, running_leaves, wide
from fusion.schedule.online.terms import Refused, nonnegative

_ROWS, _COLUMNS = 12, 8

_ALIKE = 96
"""Rows of two equal elements for each leaf that is infinite or NaN in them: so many that conditions hold in some."""


class Form(Protocol):
    """Accumulators, and the value they give."""

    @property
    def folds(self) -> tuple[Fold, ...]:
        """The accumulators, in the order in which they stand in the walk."""

    @property
    def value(self) -> Expr:
        """What they come to after it."""


def element(fold: Fold, given: Mapping[Expr, torch.Tensor]) -> torch.Tensor:
    """What one element adds to a fold: the product of its arguments."""
    return reduce(torch.mul, evaluate(fold.args, given)).double()


def rank_of(fold: Fold, running: Mapping[str, Fold]) -> int:
    """The rank of the fold's elements over walked and running values; 0 if there are too few numbers among them."""
    for positive in (False, True):
        given = _drawn(fold, running, 24, 24, positive)
        found = rank(element(fold, given))
        if found:
            return found
    return 0


def _drawn(fold: Fold, running: Mapping[str, Fold], rows: int, columns: int, positive: bool) -> Values:
    """Values for all that the elements are computed from: columns of walked values, rows of running ones."""
    source = Source()
    given: Values = {}
    for leaf in leaves(fold.args):
        is_running = isinstance(leaf, TileRef) and leaf.name in running
        if isinstance(leaf, TileRef) and is_running:
            given[leaf] = source.running(running[leaf.name], columns, positive or nonnegative(leaf, running))
        else:
            given[leaf] = source.walked(leaf, rows, positive)
    return given


class Trial:
    """Tries forms of one fold."""

    def __init__(self, fold: Fold, running: Mapping[str, Fold]) -> None:
        self.fold, self.running = fold, running
        self.refs = running_leaves(fold.args, running)

    # At any running values

    def confirm(self, form: Form) -> None:
        """Does the form give the fold, and does a carry lead from any running values to any others?

        Raises:
            Refused: it does not, or there are too few numbers to tell.
        """
        for positive in (False, True):
            given = _drawn(self.fold, self.running, _ROWS, _COLUMNS, positive)
            later = dict(given)
            later.update((ref, given[ref].roll(3, dims=1)) for ref in self.refs)
            if self._confirmed(form, given, later):
                return
        raise Refused("no numbers to try it with")

    def _confirmed(self, form: Form, given: Values, later: Values) -> bool:
        state = self._state(form, given)
        carried = self._carried(form, later, self._before(given, state))
        new = self._state(form, later)
        exact, got = element(self.fold, later), evaluate([form.value], {**later, **new})[0]
        for want, found in ((exact, got), *((new[fold.ref], carried[fold.ref]) for fold in form.folds)):
            usable = want.isfinite() & found.isfinite()
            if usable.double().mean() < 0.25:
                return False
            # What is a difference is as exact as what it is a difference of.
            size = reduce(torch.maximum, [value.abs().nan_to_num(0, 0, 0) for value in (want, *new.values())])
            if (usable & ((want - found).abs() > 1e-8 * (size + 1))).any():
                raise Refused("no factor: the rules say otherwise, but the numbers differ")
        return True

    def _state(self, form: Form, given: Values) -> Values:
        """The accumulators after one element."""
        return {fold.ref: element(fold, given) for fold in form.folds}

    def _before(self, given: Values, state: Values) -> Values:
        """Running values and accumulators as they were before a block."""
        both: Values = {ref: given[ref] for ref in self.refs}
        both.update(state)
        return {TileRef(ref.name, ref.dtype, True): value for ref, value in both.items() if isinstance(ref, TileRef)}

    def _carried(self, form: Form, given: Values, before: Values) -> Values:
        """What accumulators have become when the running values went from `before` to `given`."""
        found = evaluate([fold.carry or fold.before for fold in form.folds], {**given, **before})
        return {fold.ref: value for fold, value in zip(form.folds, found, strict=True)}

    # At infinity and zero

    def propagates(self, form: Form) -> None:
        """Where an infinity, NaN or 0 is among what is folded, is the result finite just if it was?

        Raises:
            Refused: it is not, as in max(x · d): with x = (-inf, 1) and d = 0, that is NaN, and max(x) · d is 0.
        """
        given = self._pairs(Source())
        for name in (ref.name for ref in self.refs):
            self._complete(name, given)
        want = _folded(self.fold, given)
        for fold in form.folds:
            given[fold.ref] = _folded(fold, given)
        got = evaluate([form.value], given)[0]
        if bool((want.isfinite() != got.isfinite()).any()):
            raise Refused("infinity: at an infinite value or 0, what is NaN would be finite or the other way round")

    def _pairs(self, source: Source) -> Values:
        """Two elements in each row; in some, a leaf of the first is infinite or NaN, or one of both is 0.

        In others, both are equal: what a condition leaves out, it leaves out of the whole row.  One of random numbers
        never does.
        """
        roots = [*self.fold.args, *(arg for fold in self.running.values() for arg in fold.args)]
        own = [leaf for leaf in leaves(roots) if not self._is_running(leaf)]
        pivots = [leaf for leaf in own if leaf.dtype.is_floating_point][:8]
        given: Values = {}
        for leaf in own:
            apart = source.walked(leaf, 24 * (len(pivots) + 1)).reshape(-1, 2)
            alike = source.walked(leaf, _ALIKE * (len(pivots) + 1)).repeat(1, 2)
            if leaf in pivots:
                k = pivots.index(leaf)
                apart[12 * k : 12 * k + 6, 0] = torch.tensor([math.inf, -math.inf, math.nan] * 2, dtype=torch.float64)
                apart[12 * k + 6 : 12 * k + 12] = 0
                odd = torch.tensor([[math.inf], [-math.inf], [math.nan]], dtype=torch.float64)
                alike[_ALIKE * k : _ALIKE * (k + 1)] = odd.repeat(_ALIKE // 3, 2)
            if isinstance(leaf, Random):
                alike[:] = torch.tensor([0.01, 0.99], dtype=torch.float64)
            given[leaf] = torch.cat([apart, alike])
        return given

    def _is_running(self, leaf: Expr) -> bool:
        return isinstance(leaf, TileRef) and leaf.name in self.running

    def _complete(self, name: str, given: Values) -> None:
        """Add the value of a running fold over each row, after those it is made of."""
        fold = self.running[name]
        if fold.ref in given:
            return
        for ref in running_leaves(fold.args, self.running):
            self._complete(ref.name, given)
        given[fold.ref] = _folded(fold, given)

    # At the identity

    def holds_from_start(self, ref: TileRef, form: Form) -> bool:
        """Is what was summed up while `ref` was at its identity right when it leaves it, and nothing if it is empty?"""
        given, _ = self._given_at(ref)
        leaving = torch.tensor([[-1000.0, -2.5, 0.75, 1000.0]], dtype=torch.float64).to(wide(ref.dtype))
        later = {**given, ref: leaving}
        state, new = self._state(form, given), self._state(form, later)
        for start, want in ((state, new), (self._empty(form, given), None)):
            before = self._before(given, start)
            moved, stayed = self._carried(form, later, before), self._carried(form, given, before)
            for fold in form.folds:
                known = start[fold.ref] if want is None else want[fold.ref]
                if not _same(moved[fold.ref], known) or not _same(stayed[fold.ref], start[fold.ref]):
                    return False
        return True

    def constants_at_start(self, form: Form) -> dict[TileRef, float]:
        """The fold's value if an extreme value is at its identity in the end, where the form does not give it.

        Raises:
            Refused: it is no constant.
        """
        found: dict[TileRef, float] = {}
        for ref in self.refs:
            if self.running[ref.name].op not in ("max", "min"):
                continue
            given, possible = self._given_at(ref)
            want = element(self.fold, given)
            got = evaluate([form.value], {**given, **self._state(form, given)})[0]
            if not possible or _same(got, want):
                continue
            first = want.flatten()[0]
            if not _same(want, first) or (self.fold.op in ("sum", "dot") and math.isfinite(first) and first != 0):
                raise Refused(f"start: what is left if {ref.name} has seen nothing depends on what it has not seen")
            found[ref] = float(first)
        return found

    def _empty(self, form: Form, given: Values) -> Values:
        """The accumulators before the first element."""
        shape = torch.zeros_like(element(self.fold, given))
        return {fold.ref: shape + float(identity(fold.op, fold.dtype)) for fold in form.folds}

    def _given_at(self, ref: TileRef) -> tuple[Values, bool]:
        """Values such that `ref` is at its identity, and whether there are such: it follows from its own elements."""
        fold = self.running[ref.name]
        least, arg = float(identity(fold.op, fold.dtype)), fold.args[0]
        given = self._rows_at(arg, least)
        kept = evaluate([arg], given)[0].double().expand(_rows_of(given), 1).squeeze(1) == least
        possible = bool(kept.any())
        if possible:
            given = {leaf: value[kept] if len(value) > 1 else value for leaf, value in given.items()}
        else:
            given[arg] = torch.full((1, 1), least, dtype=torch.float64)
        for other in self.refs:
            if _depends(self.running[other.name], ref.name, self.running):
                own = self.running[other.name]
                given[other] = _at_identity(own)
        given[ref] = _at_identity(fold)
        return given, possible

    def _rows_at(self, arg: Expr, least: float) -> Values:
        """Rows of walked values: some as they come, some with all conditions true or false, some with one leaf least.

        Running values are the same in all of them.
        """
        source = Source()
        given: Values = {}
        pivots = [leaf for leaf in leaves([arg]) if leaf.dtype.is_floating_point][:16]
        rows = 16 + 4 * len(pivots)
        for leaf in leaves([arg, *self.fold.args]):
            if isinstance(leaf, TileRef) and leaf.name in self.running:
                given[leaf] = source.running(self.running[leaf.name], 1, nonnegative(leaf, self.running))
                continue
            value = source.walked(leaf, rows)
            if leaf.dtype is torch.bool:
                value[:4], value[4:8] = True, False
            elif leaf in pivots:
                at = 16 + 4 * pivots.index(leaf)
                value[at : at + 4] = least
            given[leaf] = value
        return given


def _folded(fold: Fold, given: Values) -> torch.Tensor:
    """A fold over the two elements of each row."""
    args = [element(fold, given)] if fold.op == "dot" else evaluate(fold.args, given)
    sizes = [(1, 2), *(arg.shape for arg in args)]
    shape = torch.broadcast_shapes(*sizes)  # type: ignore[no-untyped-call]  # torch has no annotation
    pairs = [arg.expand(shape) for arg in args]
    return folds.fold(merged_op(fold), pairs, [1])[-1].to(wide(fold.dtype))


def _at_identity(fold: Fold) -> torch.Tensor:
    """Its value before the first element."""
    return torch.full((1, 1), identity(fold.op, fold.dtype), dtype=wide(fold.dtype))


def _rows_of(given: Values) -> int:
    return max(len(value) for value in given.values())


def _same(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Are they equal up to rounding in float64, infinities and NaN included?"""
    close = torch.isclose(found, want, rtol=1e-9, atol=1e-12, equal_nan=True)
    return bool(close.all())


def _depends(fold: Fold, name: str, running: Mapping[str, Fold]) -> bool:
    """Is a running fold made of the one called `name`, directly or through others?"""
    seen, stack = {fold.name}, [fold]
    while stack:
        for node in postorder(*stack.pop().args):
            if isinstance(node, TileRef) and node.name in running and node.name not in seen:
                seen.add(node.name)
                stack.append(running[node.name])
    return name in seen


__all__ = ["Form", "Trial", "rank_of"]
