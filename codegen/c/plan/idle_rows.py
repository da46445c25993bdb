"""Restricts the loop of the lanes to the points of other loops at which folds have an effect, by one condition.

A masked sum of rows (the gradient of a table with few rows, a mean of the tokens that count) adds nothing for the rows
that are masked out.  With a branch around the loop of the lanes these are not read, and no lane chooses: GCC does not
vectorise nested choices by conditions that are the same for all lanes.  (measured: docs/performance.md, `LEAST_LANES`)

Input: a sweep that only folds, along other axes than its lanes; output: the sweep simplified to where all of its folds
have an effect, and that condition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from fusion.codegen.c.plan.loop_bounds import is_check, is_idle
from fusion.codegen.c.plan.loop_fusion import Sweep
from fusion.lowering.algebra.conditions import conjuncts, given, negated
from fusion.lowering.ir.expr import Const, Expr, Load, Op, free_axes, make_op, postorder
from fusion.lowering.ir.kernel import KernelAxis, Spans

LEAST_LANES = 16
"""The fewest lanes for which a branch that is not foreseen costs less than the additions that it skips."""


@dataclass(frozen=True, slots=True)
class BusyRows:
    """A sweep that was simplified for where `condition` holds; elsewhere its folds have no effect in any lane."""

    sweep: Sweep
    condition: Expr


def busy_rows(sweep: Sweep, lane: KernelAxis, where: Spans) -> BusyRows | None:
    """Return the condition, the same for all lanes, without which `sweep` has no effect; None if there is none."""
    if not sweep.folds or sweep.stores or sweep.keeps or sweep.scans or lane.symbol in sweep.over:
        return None
    if lane.size.is_Integer and lane.size < LEAST_LANES:
        return None
    order = postorder(*sweep.roots)
    if any(is_check(node) and lane.symbol in where[node] for node in order):
        return None  # eager checks each index, whatever its use
    needed = [condition for tested in _uniform(order, lane, where) for condition in _needed(sweep, tested)]
    if not needed:
        return None
    condition = reduce(lambda first, second: make_op("and", first, second), needed)
    folds = tuple(replace(fold, args=tuple(given(condition, fold.args))) for fold in sweep.folds)
    for node in set(postorder(*(arg for fold in folds for arg in fold.args))).difference(order):
        if (isinstance(node, Load) or is_check(node)) and lane.symbol not in free_axes(node):
            return None  # the same in all lanes: it is loaded or checked before their loop, also if that is empty
    return BusyRows(replace(sweep, folds=folds), condition)


def _uniform(order: Sequence[Expr], lane: KernelAxis, where: Spans) -> Iterator[Expr]:
    """Yield the conditions of choices, and the parts of these, that are the same for all lanes."""
    choices = (node for node in order if isinstance(node, Op) and node.name == "where")
    parts = dict.fromkeys(part for choice in choices for part in conjuncts(choice.args[0]))
    return (part for part in parts if lane.symbol not in where[part] and not isinstance(part, Const))


def _needed(sweep: Sweep, tested: Expr) -> Iterator[Expr]:
    """Yield the condition, or its opposite, without which no fold of a sweep has an effect."""
    for holds in (False, True):
        if all(is_idle(fold, tested, holds=holds) for fold in sweep.folds):
            yield negated(tested) if holds else tested


__all__ = ["BusyRows", "busy_rows"]
