"""Decomposes sums, products and quotients of varying and running values into terms.

Inseparable (`Inseparable`): sums that cancel: products of (x - d) and x, which are raw moments.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fusion.lowering.ir.expr import Expr, Op, const, make_op, postorder
from fusion.schedule.online.dependences import RunningDependences, undivided
from fusion.schedule.online.terms import (
    DeferredFactor,
    ExponentialFactor,
    Inseparable,
    Kind,
    LoopTerm,
    RangePart,
    Terms,
    add_all,
    cores,
    factors_of,
    is_sum,
    loop_of,
    negated,
    scaled_by,
)


def added(left: Terms, right: Terms, dtype: torch.dtype) -> Terms:
    """Return the terms of both sides; terms with the same factors are merged."""
    merged: list[LoopTerm] = []
    for term in (*left, *right):
        same = [t for t in merged if factors_of(t) == factors_of(term) and not t.shift and not term.shift]
        if not same:
            merged.append(term)
            continue
        pair = (same[0], term)
        one = const(1, dtype)
        loop = add_all([(t.loop if t.loop is not None else one, t.negative) for t in pair])
        merged[merged.index(same[0])] = replace(term, loop=loop, negative=False)
    return tuple(merged)


def summands(dependences: RunningDependences, node: Expr, terms: Terms) -> Terms:
    """Return the terms of `node`, a sum of running values split into summands if an extreme value is among them."""
    if dependences.kind(node) is not Kind.RUNNING:
        return terms
    summands: list[LoopTerm] = []
    stack = [(node, False)]
    while stack:
        part, negative = stack.pop()
        if isinstance(part, Op) and part.name in ("add", "sub", "neg"):
            last = negative is (part.name == "add")  # the sign of the last operand
            stack.append((part.args[-1], last))
            if len(part.args) == 2:
                stack.append((part.args[0], negative))
        else:
            summands.extend(replace(term, negative=negative) for term in undivided(dependences, part))
    return tuple(summands) if any(dependences.is_extreme(term) for term in summands) else terms


def with_shift(dependences: RunningDependences, node: Expr, terms: Terms, factors: Terms) -> Terms:
    """Return the terms of `node`, for multiplication by the one term of the other side.

    In a sum, an extreme value stays with the value that it shifts: x - max(x) is small, x and max(x) are not.
    """
    if not is_sum(terms) or is_sum(factors) or dependences.is_fixed(factors[0]):
        return terms
    check_moments(dependences, terms, factors[0])
    kept = [term for term in terms if dependences.is_extreme(term)]
    varying = [term for term in terms if term not in kept and not dependences.is_fixed(term)]
    if not kept or len(varying) != 1 or varying[0].steps or varying[0].ranges or varying[0].shift:
        return terms
    parts = tuple(RangePart(term.steps[0].value, term.negative, term.loop) for term in kept)
    loop = _without_rest(dependences, node)
    if loop is None:
        loop = add_all([(loop_of(varying[0]), varying[0].negative), *((scaled_by(p), p.negative) for p in parts)])
    rest = [term for term in terms if term not in kept and term is not varying[0]]
    return (LoopTerm(loop, shift=parts), *rest)


def _without_rest(dependences: RunningDependences, root: Expr) -> Expr | None:
    """Return a sum without the running summands that are no extreme values; None if it is not a sum."""
    done: dict[Expr, Expr | None] = {}
    for node in postorder(root):
        if not dependences.kind(node) & Kind.RUNNING or dependences.extremes_only(node):
            done[node] = node
        elif not isinstance(node, Op) or node.name not in ("add", "sub", "neg"):
            if dependences.kind(node) is Kind.MIXED:
                return None
            done[node] = None
        else:
            args = [done[arg] for arg in node.args]
            left, right = args[0], args[-1]
            if left is None or right is None:
                only = right if left is None else left
                negative = only is not None and left is None and node.name == "sub"
                done[node] = make_op("neg", only) if negative and only is not None else only
            else:
                done[node] = node.rebuild([left, right][: len(args)])
    return done[root]


def check_moments(dependences: RunningDependences, terms: Terms, factor: LoopTerm) -> None:
    """Refuse (x - d) · x."""
    if factor.loop is None or not is_sum(terms):
        return
    factor_cores = cores(factor.loop)
    for term in terms:
        if term.loop is not None and not dependences.is_fixed(term) and cores(term.loop) & factor_cores:
            raise Inseparable("cancels: the difference of a varying and a running value, times that varying value")


def inverse(term: LoopTerm, dtype: torch.dtype) -> LoopTerm:
    """Return 1 / term."""
    if any(step.name == "where" for step in term.steps):
        raise Inseparable("no factor: a division by what a running value switches off")
    steps = tuple(DeferredFactor("truediv" if step.name == "mul" else "mul", step.value) for step in term.steps)
    loop = None if term.loop is None else make_op("truediv", const(1, dtype), term.loop)
    ranges = tuple(ExponentialFactor(r.function, negated(r.parts)) for r in term.ranges)
    return LoopTerm(loop, steps, ranges, term.negative)
