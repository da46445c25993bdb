"""Computes centred moments, sums of deviations from a mean, in parts with a mean each.

    Σ (x - d)² over all parts      is      Σ over parts of   Σ (x - c)² + 2 (c - d) Σ (x - c) + n (c - d)²

with c the mean of the n elements of a part, which is near enough to all of them that nothing cancels, however far the
total mean d is from 0.  So a part needs only its own elements, and mean and variance of long rows are parts in one pass
and their merge.  A loop cannot do this from block to block: its running mean moves.

Input: a fold whose operand is (x - d) or its square, beside a running sum of x; output: accumulators of a part, whose
`carry` is the part's contribution to the total (`merge.contribution`).

Source: Chan, Golub, LeVeque: Algorithms for Computing the Sample Variance, 1983.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from fusion.lowering.ir.expr import Const, Expr, Op, const, make_op
from fusion.lowering.ir.kernel import Fold
from fusion.schedule.online import Online
from fusion.schedule.online.dependences import RunningDependences
from fusion.schedule.online.terms import Kind


def about_means(fold: Fold, running: Mapping[str, Fold], points: Expr) -> Online | None:
    """Return the accumulators of `fold` in parts of `points` elements; None unless it sums deviations."""
    if fold.op != "sum" or fold.dtype not in (torch.float32, torch.float64):
        return None
    (value,) = fold.args
    squared = isinstance(value, Op) and value.name == "mul" and value.args[0] is value.args[1]
    deviation = value.args[0] if isinstance(value, Op) and squared else value
    if not isinstance(deviation, Op) or deviation.name != "sub" or deviation.dtype is not fold.dtype:
        return None
    x, mean = deviation.args
    dependences = RunningDependences(fold.over, running)
    total = _known(lambda name: replace(fold, name=name, args=(x,)), running)
    if total is None or dependences.kind(x) is not Kind.VARYING or dependences.kind(mean) is not Kind.RUNNING:
        return None
    # A part may lie behind the end of the axis.
    several = points if isinstance(points, Const) else make_op("maximum", points, const(1, fold.dtype))
    near = make_op("sub", x, make_op("truediv", total.ref, several))
    gap = make_op("sub", make_op("truediv", total.before, several), mean)

    def rest(name: str) -> Fold:
        sums = replace(fold, name=name, args=(near,))
        return replace(sums, carry=make_op("add", sums.before, make_op("mul", points, gap)))

    known = _known(rest, running)
    first = known or rest(f"{fold.name}_0" if squared else fold.name)
    sums = () if known else (first,)
    if not squared:
        return Online(sums, first.ref)
    twice = make_op("add", make_op("add", first.before, first.before), make_op("mul", points, gap))
    carry = make_op("add", fold.before, make_op("mul", gap, twice))
    return Online((*sums, replace(fold, args=(make_op("mul", near, near),), carry=carry)), fold.ref)


def _known(wanted: Callable[[str], Fold], running: Mapping[str, Fold]) -> Fold | None:
    """Return a running fold that equals the wanted one, built with its name."""
    return next((fold for fold in running.values() if fold == wanted(fold.name)), None)


__all__ = ["about_means"]
