"""Derives online forms: a fold whose values depend on folds over the same axes runs in one loop with them.

Input: such a fold, say Σ exp(x - m) with m = max(x); output: accumulators in the same loop as the folds they depend on,
which follow their running values from block to block, and the original fold as a function of the complete
accumulators.  `decompose` turns the values of the fold into terms, `update` computes how an accumulator is corrected,
this file combines the two, and `trial` checks the result numerically.

Factors that depend on a running value, but cannot overflow (1/l, rsqrt, a scale), are applied after the loop.  A factor
that would leave the range of floats without its shift (exp) stays inside, and is carried.  A fold has several
accumulators if its value is a sum, as in Σ p·(x - d).

Inseparable, with a reason: values in which varying and running parts cannot be separated, raw moments and sums of
deviations, which cancel, sums and extremes of rounded values, and exponents that are not bounded by an extreme value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

from fusion.lowering.ir.expr import Cast, Expr, TileRef, const, make_cast, make_op, postorder
from fusion.lowering.ir.kernel import Fold
from fusion.lowering.ir.scalar_ops import FoldName
from fusion.schedule.online.decompose import terms_of
from fusion.schedule.online.dependences import RunningDependences
from fusion.schedule.online.names import Renaming
from fusion.schedule.online.sums import check_moments
from fusion.schedule.online.terms import (
    Inseparable,
    Kind,
    LoopTerm,
    RangePart,
    Terms,
    add_all,
    apply,
    loop_of,
    nonnegative,
    unmasked,
)
from fusion.schedule.online.trial import NumericTrial, rank_of
from fusion.schedule.online.update import STARTS, Start, Update, refs_of


@dataclass(frozen=True, slots=True)
class Online:
    """A fold in a form that needs no complete fold over the same axes.

    Attributes:
        folds: accumulators, in this order in the loop, behind the folds they depend on.  Empty if the running folds
            already accumulate everything.
        value: the original fold, from complete accumulators.  It replaces the fold's name in all later statements; in a
            later fold of the same loop, it is the running value.
    """

    folds: tuple[Fold, ...]
    value: Expr


def online(fold: Fold, running: Mapping[str, Fold]) -> Online | str:
    """Return the online form of `fold` in one loop with `running`, the earlier folds over the same axes.

    Returns:
        The form, or the reason why there is none.

    >>> from fusion.lowering.indexing import over_symbol
    >>> from fusion.lowering.printer import format_expr
    >>> from fusion.lowering.ir.expr import Load
    >>> r, f32 = over_symbol(0), torch.float32
    >>> x = Load("x", (r,), f32)
    >>> top = Fold("top", "max", (x,), (r,), f32)
    >>> total = Fold("total", "sum", (make_op("exp", make_op("sub", x, top.ref)),), (r,), f32)
    >>> print(format_expr(online(total, {"top": top}).folds[0].carry))
    total' * where(top' == top, 1.0, exp(top' - top))
    """
    dependences = RunningDependences(fold.over, running)
    if not any(dependences.kind(arg) & Kind.RUNNING for arg in fold.args):
        return Online((fold,), fold.ref)
    names = Renaming.plain((*running.values(), fold))
    own = names.tiles[fold.name]
    form = _followed(names.fold(fold), tuple(names.fold(each) for each in running.values()))
    if isinstance(form, str):
        return names.back({}).text(form)
    back = names.back({each.name: fold.name + each.name.removeprefix(own) for each in form.folds})
    return Online(tuple(back.fold(each) for each in form.folds), back.values([form.value])[0])


@lru_cache(maxsize=1 << 10)
def _followed(fold: Fold, folds: tuple[Fold, ...]) -> Online | str:
    """Derive the online form by algebra and trial; cached, because layers of a model differ in names alone."""
    running = {each.name: each for each in folds}
    dependences = RunningDependences(fold.over, running)
    try:
        return _Rule(fold, running, dependences).run()
    except Inseparable as refused:
        reason = str(refused)
    if reason.startswith("no factor"):
        matrix_rank = rank_of(fold, running)
        detail = reason.removeprefix("no factor: ")
        return f"no factor: {'full rank' if matrix_rank > 3 or not matrix_rank else f'rank {matrix_rank}'} ({detail})"
    return reason


_Key = tuple[FoldName, tuple[Expr, ...]]
"""The contents of an accumulator: its operation and arguments."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One term of the fold's value: its sum, and the rest as in `LoopTerm`, for both factors of a dot together."""

    sums: _Key
    base: _Key | None
    term: LoopTerm


class _Rule:
    def __init__(self, fold: Fold, running: Mapping[str, Fold], dependences: RunningDependences) -> None:
        self.fold, self.running, self.dependences = fold, running, dependences

    def run(self) -> Online:
        fold = self.fold
        if fold.op not in ("sum", "dot", "max", "min"):
            raise Inseparable(f"a {fold.op} of running values cannot be brought up to date")
        if fold.dtype not in (torch.float32, torch.float64):
            raise Inseparable(f"a running value of {fold.dtype} is too narrow to be brought up to date")
        self._check_roundings()
        terms = self._terms()
        varying, rest = self._extreme(terms) if fold.op in ("max", "min") else (terms, ())
        pieces = [self._piece(term) for term in varying]
        trial = NumericTrial(fold, self.running)
        update = Update(self.running, self._starts(pieces, rest, trial))
        unshared = self._assemble(pieces, rest, update, share=False)
        trial.confirm(unshared)
        ends = trial.constants_at_start(unshared)
        trial.propagates(_ended(unshared, ends, update))
        return _ended(self._assemble(pieces, rest, update, share=True), ends, update)

    # Terms of one or two operands

    def _terms(self) -> list[tuple[LoopTerm, ...]]:
        """Return the terms of the fold's value, a `LoopTerm` for each operand."""
        operands = [terms_of(self.dependences, arg) for arg in self.fold.args]
        if len(operands) == 2:
            if all(len(terms) > 1 or terms[0].shift for terms in operands):
                raise Inseparable("cancels: a product of sums of varying and running values needs raw moments")
            for terms, others in (operands, operands[::-1]):
                check_moments(self.dependences, terms, others[0])
        elif self.fold.op == "sum":
            self._check_deviations(operands[0])
        return list(product(*operands))

    def _check_roundings(self) -> None:
        """Refuse rounded values at their final scale, except in products.

        Other nodes read the rounded numbers too: an extreme must be one of them, and the differences of a sum from them
        are small.
        """
        for node in postorder(*self.fold.args) if self.fold.op != "dot" else ():
            narrows = isinstance(node, Cast) and node.dtype.itemsize < node.arg.dtype.itemsize
            if narrows and self.dependences.kind(node) is Kind.MIXED:
                raise Inseparable(f"rounded: a {self.fold.op} of values rounded to {node.dtype} at their final scale")

    def _check_deviations(self, terms: Terms) -> None:
        """Refuse Σ (x - d) where d depends on Σ x: the difference of the two sums is nearly nothing."""
        summed = [unmasked(loop_of(term)) for term in terms if not self.dependences.is_fixed(term)]
        for ref in refs_of([RangePart(step.value, False) for term in terms for step in term.steps]):
            fold = self.running[ref.name]
            if len(terms) > 1 and fold.op == "sum" and unmasked(fold.args[0]) in summed:
                raise Inseparable(f"cancels: the sum of differences from {ref.name}, which is a sum of the same")

    def _piece(self, terms: tuple[LoopTerm, ...]) -> _Piece:
        """Return one accumulator: the operands' varying parts under the fold, everything else combined."""
        combined = LoopTerm(
            None,
            tuple(step for term in terms for step in term.steps),
            tuple(each for term in terms for each in term.ranges),
            sum(term.negative for term in terms) % 2 == 1,
            tuple(part for term in terms for part in term.shift),
        )
        loops = [term.loop for term in terms]
        bases = [term.base if term.shift else term.loop for term in terms]
        return _Piece(self._key(loops), self._key(bases) if combined.shift else None, combined)

    def _key(self, loops: list[Expr | None]) -> _Key:
        """Return the fold of the varying parts; a product with a fixed factor is a sum."""
        dtype = self.fold.dtype
        fixed = [loop is None or self.dependences.kind(loop) is Kind.FIXED for loop in loops]
        if self.fold.op != "dot" or not any(fixed):
            pairs = zip(loops, self.fold.args, strict=True)
            return self.fold.op, tuple(const(1, arg.dtype) if loop is None else loop for loop, arg in pairs)
        values = [make_cast(loop, dtype) for loop in loops if loop is not None]
        summand = make_op("mul", *values) if len(values) == 2 else values[0] if values else const(1, dtype)
        return "sum", (summand,)

    def _extreme(self, terms: list[tuple[LoopTerm, ...]]) -> tuple[list[tuple[LoopTerm, ...]], tuple[LoopTerm, ...]]:
        """Return the one varying term of a max or min, and the terms that only shift it."""
        varying = [term for (term,) in terms if not self.dependences.is_fixed(term)]
        if len(varying) != 1 or varying[0].shift:
            raise Inseparable(f"no factor: a {self.fold.op} of a sum of varying and running values")
        term = varying[0]
        for step in term.steps:
            if step.name != "where" and not nonnegative(step.value, self.running):
                raise Inseparable(f"no factor: a {self.fold.op} of a product with a factor of unknown sign")
        if term.negative and term.loop is not None:
            term = replace(term, loop=make_op("neg", term.loop), negative=False)
        return [(term,)], tuple(other for (other,) in terms if other is not varying[0])

    # Accumulators

    def _assemble(self, pieces: list[_Piece], rest: tuple[LoopTerm, ...], update: Update, share: bool) -> Online:
        """Return the accumulators with their carries, and the value.

        share: leave out accumulators that a running fold equals.
        """
        sums = [_safe(piece.sums, update) for piece in pieces]
        bases = [piece.base and _safe(piece.base, update) for piece in pieces]
        keys = dict.fromkeys(key for pair in zip(bases, sums, strict=True) for key in pair if key is not None)
        accumulators = {key: known for key in keys if share and (known := self._known(key))}
        new = [key for key in keys if key not in accumulators]
        for k, key in enumerate(new):
            accumulators[key] = self._fold(self.fold.name if len(new) == 1 else f"{self.fold.name}_{k}", key)
        for piece, key, base in zip(pieces, sums, bases, strict=True):
            ranges, shift = piece.term.ranges, piece.term.shift
            if base is not None and base in new and ranges:
                accumulators[base] = replace(accumulators[base], carry=update.carry(accumulators[base], ranges))
            if key in new and (ranges or shift):
                accumulators[key] = replace(
                    accumulators[key], carry=update.carry(accumulators[key], ranges, shift, base and accumulators[base])
                )
        value = self._value(
            [(accumulators[key].ref, piece.term) for key, piece in zip(sums, pieces, strict=True)], rest
        )
        return Online(tuple(accumulators[key] for key in new), value)

    def _fold(self, name: str, key: _Key) -> Fold:
        operation, args = key
        if operation == self.fold.op:
            return replace(self.fold, name=name, args=args)
        return Fold(name, operation, args, self.fold.over, self.fold.dtype)

    def _known(self, key: _Key) -> Fold | None:
        """Return a running fold of the same values; if these name running values, so must its own."""
        unnamed = self._fold(self.fold.name, key)
        for fold in self.running.values():
            if replace(fold, name=unnamed.name, carry=None) == unnamed:
                return fold
        return None

    def _value(self, sums: list[tuple[Expr, LoopTerm]], rest: tuple[LoopTerm, ...]) -> Expr:
        """Return the original fold: each accumulator times its deferred factors, with common factors applied last."""
        dtype = self.fold.dtype
        parts = [*sums, *((other.loop, other) for other in rest)]
        common = parts[0][1].steps
        for _, term in parts:
            while common and term.steps[len(term.steps) - len(common) :] != common:
                common = common[1:]
        signed: list[tuple[Expr, bool]] = []
        for value, term in parts:
            own = term.steps[: len(term.steps) - len(common)]
            signed.append((apply(value, own, dtype), term.negative))
        value = apply(add_all(signed), common, dtype)
        return value if self._keeps_zero([term for _, term in parts]) else make_op("add", value, const(0.0, dtype))

    def _keeps_zero(self, terms: Sequence[LoopTerm]) -> bool:
        """Return whether a zero is never −0.0: a sum starts at 0.0, so it is, and so is any sum with such a term."""

        def is_kept(term: LoopTerm) -> bool:
            factors = (step.value for step in term.steps if step.name != "where")
            return not term.negative and all(nonnegative(factor, self.running) for factor in factors)

        return self.fold.op not in ("sum", "dot") or any(map(is_kept, terms))

    # The start

    def _starts(self, pieces: list[_Piece], rest: tuple[LoopTerm, ...], trial: NumericTrial) -> dict[TileRef, Start]:
        """Choose how each running value is read while it is at its identity: the first way that holds."""
        parts = [part for piece in pieces for each in piece.term.ranges for part in each.parts]
        parts += [part for piece in pieces for part in piece.term.shift]
        starts = dict.fromkeys(refs_of(parts), STARTS[0])
        for ref in starts:
            for start in STARTS:
                update = Update(self.running, {**starts, ref: start})
                if trial.holds_from_start(ref, self._assemble(pieces, rest, update, share=False)):
                    starts[ref] = start
                    break
            else:
                raise Inseparable(f"start: while {ref.name} is at its identity, the accumulator is not")
        return starts


def _ended(form: Online, ends: Mapping[TileRef, float], update: Update) -> Online:
    """Replace the value of `form` by a constant where a running value is still its identity after the loop."""
    value = form.value
    for ref, constant in ends.items():
        value = make_op("where", update.at_identity(ref), const(constant, value.dtype), value)
    return replace(form, value=value)


def _safe(key: _Key, update: Update) -> _Key:
    return key[0], update.safe(key[1])


__all__ = ["Online", "online"]
