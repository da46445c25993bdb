"""Checks an online form numerically.

Input: a fold, the folds that run beside it, and an online form of it; output: whether the form gives the same result:
at any running values, from one value to the next, and while a running value is still at its identity.  A fold of one
element represents a fold of many, as every claim holds for each element alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Protocol

import torch

from fusion.lowering.interpret import folds
from fusion.lowering.ir.expr import Expr, Random, TileRef, postorder
from fusion.lowering.ir.kernel import Fold
from fusion.lowering.ir.scalar_ops import identity
from fusion.schedule.online.merge import merged_op
from fusion.schedule.online.sample import Sampler, Values, evaluate, leaves, rank, running_leaves, wide
from fusion.schedule.online.terms import Inseparable, nonnegative

_SAMPLE_ROWS, _SAMPLE_COLUMNS = 12, 8

_ALIKE = 96
"""Rows of two equal elements for each leaf that is infinite or NaN in them: enough that conditions hold in some."""


class OnlineForm(Protocol):
    """Accumulators, and the value computed from them."""

    @property
    def folds(self) -> tuple[Fold, ...]:
        """The accumulators, in their order in the loop."""

    @property
    def value(self) -> Expr:
        """The value after the loop."""


def element(fold: Fold, values: Mapping[Expr, torch.Tensor]) -> torch.Tensor:
    """Return the contribution of one element to a fold: the product of its arguments."""
    return reduce(torch.mul, evaluate(fold.args, values)).double()


def rank_of(fold: Fold, running: Mapping[str, Fold]) -> int:
    """Return the rank of the fold's elements over varying and running values; 0 if too few are finite."""
    for positive in (False, True):
        values = _drawn(fold, running, 24, 24, positive)
        matrix_rank = rank(element(fold, values))
        if matrix_rank:
            return matrix_rank
    return 0


def _drawn(fold: Fold, running: Mapping[str, Fold], rows: int, columns: int, positive: bool) -> Values:
    """Draw values for the leaves of the elements: columns of varying values, rows of running ones."""
    source = Sampler()
    values: Values = {}
    for leaf in leaves(fold.args):
        is_running = isinstance(leaf, TileRef) and leaf.name in running
        if isinstance(leaf, TileRef) and is_running:
            values[leaf] = source.running(running[leaf.name], columns, positive or nonnegative(leaf, running))
        else:
            values[leaf] = source.varying(leaf, rows, positive)
    return values


class NumericTrial:
    """Checks forms of one fold numerically."""

    def __init__(self, fold: Fold, running: Mapping[str, Fold]) -> None:
        self.fold, self.running = fold, running
        self.refs = running_leaves(fold.args, running)

    # At any running values

    def confirm(self, form: OnlineForm) -> None:
        """Check that the form equals the fold, and that carries lead from any running values to any others.

        Raises:
            Inseparable: that is not so, or there are too few finite numbers to tell.
        """
        for positive in (False, True):
            values = _drawn(self.fold, self.running, _SAMPLE_ROWS, _SAMPLE_COLUMNS, positive)
            later = dict(values)
            later.update((ref, values[ref].roll(3, dims=1)) for ref in self.refs)
            if self._confirmed(form, values, later):
                return
        raise Inseparable("no numbers to try it with")

    def _confirmed(self, form: OnlineForm, values: Values, later: Values) -> bool:
        state = self._state(form, values)
        carried = self._carried(form, later, self._before(values, state))
        new = self._state(form, later)
        exact, got = element(self.fold, later), evaluate([form.value], {**later, **new})[0]
        for want, computed in ((exact, got), *((new[fold.ref], carried[fold.ref]) for fold in form.folds)):
            usable = want.isfinite() & computed.isfinite()
            if usable.double().mean() < 0.25:
                return False
            # A difference is only as precise as its operands.
            size = reduce(torch.maximum, [value.abs().nan_to_num(0, 0, 0) for value in (want, *new.values())])
            if (usable & ((want - computed).abs() > 1e-8 * (size + 1))).any():
                raise Inseparable("no factor: the rules say otherwise, but the numbers differ")
        return True

    def _state(self, form: OnlineForm, values: Values) -> Values:
        """Return the accumulators after one element."""
        return {fold.ref: element(fold, values) for fold in form.folds}

    def _before(self, values: Values, state: Values) -> Values:
        """Return running values and accumulators as they were before a block."""
        both: Values = {ref: values[ref] for ref in self.refs}
        both.update(state)
        return {TileRef(ref.name, ref.dtype, True): value for ref, value in both.items() if isinstance(ref, TileRef)}

    def _carried(self, form: OnlineForm, values: Values, before: Values) -> Values:
        """Return the accumulators after the running values changed from `before` to the given values."""
        results = evaluate([fold.carry or fold.before for fold in form.folds], {**values, **before})
        return {fold.ref: value for fold, value in zip(form.folds, results, strict=True)}

    # At infinity and zero

    def propagates(self, form: OnlineForm) -> None:
        """Check that with an infinity, NaN or 0 among the elements, the form is finite where the fold is.

        Raises:
            Inseparable: it is not, as for max(x · d): with x = (-inf, 1) and d = 0, that is NaN, but max(x) · d is 0.
        """
        values = self._pairs(Sampler())
        for name in (ref.name for ref in self.refs):
            self._complete(name, values)
        want = _folded(self.fold, values)
        for fold in form.folds:
            values[fold.ref] = _folded(fold, values)
        got = evaluate([form.value], values)[0]
        if bool((want.isfinite() != got.isfinite()).any()):
            raise Inseparable("infinity: at an infinite value or 0, what is NaN would be finite or the other way round")

    def _pairs(self, source: Sampler) -> Values:
        """Draw two elements in each row; in some, a leaf of the first is infinite or NaN, or one of both is 0.

        In other rows both are equal: a condition then holds for the full row or not at all.  A condition on random
        numbers never does.
        """
        roots = [*self.fold.args, *(arg for fold in self.running.values() for arg in fold.args)]
        own = [leaf for leaf in leaves(roots) if not self._is_running(leaf)]
        pivots = [leaf for leaf in own if leaf.dtype.is_floating_point][:8]
        values: Values = {}
        for leaf in own:
            distinct = source.varying(leaf, 24 * (len(pivots) + 1)).reshape(-1, 2)
            equal = source.varying(leaf, _ALIKE * (len(pivots) + 1)).repeat(1, 2)
            if leaf in pivots:
                k = pivots.index(leaf)
                distinct[12 * k : 12 * k + 6, 0] = torch.tensor(
                    [math.inf, -math.inf, math.nan] * 2, dtype=torch.float64
                )
                distinct[12 * k + 6 : 12 * k + 12] = 0
                odd = torch.tensor([[math.inf], [-math.inf], [math.nan]], dtype=torch.float64)
                equal[_ALIKE * k : _ALIKE * (k + 1)] = odd.repeat(_ALIKE // 3, 2)
            if isinstance(leaf, Random):
                equal[:] = torch.tensor([0.01, 0.99], dtype=torch.float64)
            values[leaf] = torch.cat([distinct, equal])
        return values

    def _is_running(self, leaf: Expr) -> bool:
        return isinstance(leaf, TileRef) and leaf.name in self.running

    def _complete(self, name: str, values: Values) -> None:
        """Add the value of a running fold over each row, after the folds that it depends on."""
        fold = self.running[name]
        if fold.ref in values:
            return
        for ref in running_leaves(fold.args, self.running):
            self._complete(ref.name, values)
        values[fold.ref] = _folded(fold, values)

    # At the identity

    def holds_from_start(self, ref: TileRef, form: OnlineForm) -> bool:
        """Return whether accumulators are correct when `ref` leaves its identity, and empty if nothing was added."""
        values, _ = self._values_at_identity(ref)
        leaving = torch.tensor([[-1000.0, -2.5, 0.75, 1000.0]], dtype=torch.float64).to(wide(ref.dtype))
        later = {**values, ref: leaving}
        state, new = self._state(form, values), self._state(form, later)
        for start, want in ((state, new), (self._empty(form, values), None)):
            before = self._before(values, start)
            moved, stayed = self._carried(form, later, before), self._carried(form, values, before)
            for fold in form.folds:
                known = start[fold.ref] if want is None else want[fold.ref]
                if not _same(moved[fold.ref], known) or not _same(stayed[fold.ref], start[fold.ref]):
                    return False
        return True

    def constants_at_start(self, form: OnlineForm) -> dict[TileRef, float]:
        """Return the fold's value if an extreme value ends at its identity, where the form does not give that value.

        Raises:
            Inseparable: it is not constant.
        """
        constants: dict[TileRef, float] = {}
        for ref in self.refs:
            if self.running[ref.name].op not in ("max", "min"):
                continue
            values, possible = self._values_at_identity(ref)
            want = element(self.fold, values)
            got = evaluate([form.value], {**values, **self._state(form, values)})[0]
            if not possible or _same(got, want):
                continue
            first = want.flatten()[0]
            if not _same(want, first) or (self.fold.op in ("sum", "dot") and math.isfinite(first) and first != 0):
                raise Inseparable(f"start: if {ref.name} ends at its identity, the result is not a constant")
            constants[ref] = float(first)
        return constants

    def _empty(self, form: OnlineForm, values: Values) -> Values:
        """Return the initial values of the accumulators: the identities of their folds."""
        shape = torch.zeros_like(element(self.fold, values))
        return {fold.ref: shape + float(identity(fold.op, fold.dtype)) for fold in form.folds}

    def _values_at_identity(self, ref: TileRef) -> tuple[Values, bool]:
        """Return values with `ref` at its identity, and whether elements exist that put it there."""
        fold = self.running[ref.name]
        least, arg = float(identity(fold.op, fold.dtype)), fold.args[0]
        values = self._rows_at(arg, least)
        kept = evaluate([arg], values)[0].double().expand(_rows_of(values), 1).squeeze(1) == least
        possible = bool(kept.any())
        if possible:
            values = {leaf: value[kept] if len(value) > 1 else value for leaf, value in values.items()}
        else:
            values[arg] = torch.full((1, 1), least, dtype=torch.float64)
        for other in self.refs:
            if _depends(self.running[other.name], ref.name, self.running):
                own = self.running[other.name]
                values[other] = _at_identity(own)
        values[ref] = _at_identity(fold)
        return values, possible

    def _rows_at(self, arg: Expr, least: float) -> Values:
        """Draw rows of varying values: plain ones, ones with all conditions true or false, ones with one leaf at
        `least`.

        Running values are the same in all of them.
        """
        source = Sampler()
        values: Values = {}
        pivots = [leaf for leaf in leaves([arg]) if leaf.dtype.is_floating_point][:16]
        rows = 16 + 4 * len(pivots)
        for leaf in leaves([arg, *self.fold.args]):
            if isinstance(leaf, TileRef) and leaf.name in self.running:
                values[leaf] = source.running(self.running[leaf.name], 1, nonnegative(leaf, self.running))
                continue
            value = source.varying(leaf, rows)
            if leaf.dtype is torch.bool:
                value[:4], value[4:8] = True, False
            elif leaf in pivots:
                at = 16 + 4 * pivots.index(leaf)
                value[at : at + 4] = least
            values[leaf] = value
        return values


def _folded(fold: Fold, values: Values) -> torch.Tensor:
    """Fold the two elements of each row."""
    args = [element(fold, values)] if fold.op == "dot" else evaluate(fold.args, values)
    sizes = [(1, 2), *(arg.shape for arg in args)]
    shape = torch.broadcast_shapes(*sizes)  # type: ignore[no-untyped-call]  # not annotated in PyTorch
    pairs = [arg.expand(shape) for arg in args]
    return folds.fold(merged_op(fold), pairs, [1])[-1].to(wide(fold.dtype))


def _at_identity(fold: Fold) -> torch.Tensor:
    """Return a fold's value before the first element."""
    return torch.full((1, 1), identity(fold.op, fold.dtype), dtype=wide(fold.dtype))


def _rows_of(values: Values) -> int:
    return max(len(value) for value in values.values())


def _same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether two tensors are equal up to float64 rounding, infinities and NaN included."""
    close = torch.isclose(got, want, rtol=1e-9, atol=1e-12, equal_nan=True)
    return bool(close.all())


def _depends(fold: Fold, name: str, running: Mapping[str, Fold]) -> bool:
    """Return whether a running fold depends on the one called `name`, directly or through others."""
    seen, stack = {fold.name}, [fold]
    while stack:
        for node in postorder(*stack.pop().args):
            if isinstance(node, TileRef) and node.name in running and node.name not in seen:
                seen.add(node.name)
                stack.append(running[node.name])
    return name in seen


__all__ = ["NumericTrial", "OnlineForm", "rank_of"]
