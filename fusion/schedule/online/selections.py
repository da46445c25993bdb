"""Decomposes `where` and casts of varying and running values.

Inseparable (`Inseparable`): a condition that depends on both, roundings of sums, operands that may not fit float16.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fusion.lowering.ir.expr import Cast, Expr, Op, const, make_op
from fusion.schedule.online.dependences import RunningDependences
from fusion.schedule.online.terms import (
    DeferredFactor,
    Inseparable,
    Kind,
    LoopTerm,
    Terms,
    cast_again,
    factors_of,
    fits_half,
    is_infinite,
    is_sum,
    is_zero,
    loop_of,
    nonnegative,
    signed_loop,
)


def choice(dependences: RunningDependences, node: Op, args: list[Terms]) -> Terms:
    """Decompose a `where`: a varying condition masks each term; a running condition may only replace a value by 0."""
    mask, one, other = node.args
    if dependences.kind(mask) is Kind.MIXED:
        raise Inseparable("no factor: a choice by a running value and a varying one")
    if dependences.kind(mask) is Kind.RUNNING:
        return _switched(dependences, node, args)
    if is_infinite(one) or is_infinite(other):
        return _masked(dependences, node, args[1] if is_infinite(other) else args[2])
    zero = const(0, node.dtype)
    both_arms = (*args[1], *args[2])
    if (
        len(both_arms) == 2
        and factors_of(both_arms[0]) == factors_of(both_arms[1])
        and not both_arms[0].shift
        and not both_arms[1].shift
    ):
        loops = [signed_loop(term, node.dtype) for term in both_arms]
        return (replace(both_arms[0], loop=make_op("where", mask, *loops), negative=False),)
    masked_terms: list[LoopTerm] = []
    for terms, arm in ((args[1], 0), (args[2], 1)):
        for term in terms:
            if is_zero(term.loop):
                continue

            def masked(loop: Expr | None, arm: int = arm) -> Expr:
                value = const(1, node.dtype) if loop is None else loop
                return make_op("where", mask, zero, value) if arm else make_op("where", mask, value, zero)

            base = masked(term.base) if term.shift else None
            masked_terms.append(replace(term, loop=masked(term.loop), base=base))
    return tuple(masked_terms)


def _switched(dependences: RunningDependences, node: Op, args: list[Terms]) -> Terms:
    """Decompose a `where` with a running condition, which may only switch a value off."""
    mask, one, other = node.args
    if not is_zero(one) and not is_zero(other):
        raise Inseparable("no factor: a running value chooses between two values")
    off = mask if is_zero(one) else make_op("not", mask)
    terms = args[2] if is_zero(one) else args[1]
    return tuple(replace(term, steps=(*term.steps, DeferredFactor("where", off))) for term in terms)


def _masked(dependences: RunningDependences, node: Op, terms: Terms) -> Terms:
    """Decompose an infinity under a mask: it is unchanged by summands and positive factors."""
    varying = [term for term in terms if not dependences.is_fixed(term)]
    if len(varying) != 1 or varying[0].ranges or varying[0].shift:
        raise Inseparable("no factor: an infinity instead of a sum")
    for step in varying[0].steps:
        if step.name == "where" or not nonnegative(step.value, dependences.running):
            raise Inseparable("no factor: an infinity instead of a product with a factor of unknown sign")
    mask, one, other = node.args
    loop = signed_loop(varying[0], node.dtype)
    loop = make_op("where", mask, one, loop) if is_infinite(one) else make_op("where", mask, loop, other)
    return tuple(replace(t, loop=loop, negative=False) if t is varying[0] else t for t in terms)


def rounded(node: Cast, terms: Terms) -> Terms:
    """Decompose a rounding, which commutes with scaling up to rounding; in a sum, it would round terms that cancel."""
    source = node.arg.dtype
    if not (node.dtype.is_floating_point and source.is_floating_point):
        raise Inseparable("no factor: a running value is rounded to an integer together with a varying one")
    narrow = node.dtype.itemsize < source.itemsize
    if narrow and is_sum(terms):
        raise Inseparable("cancels: a sum of varying and running values is rounded")
    for term in terms:
        half = node.dtype is torch.float16 and narrow and term.steps and term.loop is not None
        if half and not fits_half(loop_of(term)):
            raise Inseparable("out of range: without its running factor, an operand may not fit float16")
    return tuple(
        replace(
            term,
            loop=None if term.loop is None else cast_again(term.loop, node),
            base=None if term.base is None else cast_again(term.base, node),
        )
        for term in terms
    )
