"""Finds the condition under which a walk may skip whole blocks, because nothing in them counts.

Input: the folds of a walk; output: a condition (a bool expression), false only at points where every fold sees its
identity: what a causal mask leaves out, a sliding window, another document, or padding.  A `where` that chooses a
constant is a candidate; with the constant in its place, the folds are evaluated on samples.

A condition asks indices, and integers and bools in memory.  Of these a generator uses those of which a block of the
walk has a few: a vector along the walk or along the rows, a number.

What the tensors hold at a point that is masked out is taken not to count, even if it is infinite or NaN, as in every
kernel for attention.  Eager multiplies it by 0, which would be NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy
import torch

from fusion.lowering.conditions import negated, plain
from fusion.lowering.expr import (
    Cast,
    Const,
    Expr,
    Load,
    Op,
    Random,
    TileRef,
    free_axes,
    loads,
    make_op,
    postorder,
    rewrite,
)
from fusion.lowering.kernel import Fold
from fusion.lowering.scalar_ops import SCALAR_OPS, identity

SAMPLES = 64


def counts_where(folds: Sequence[Fold], walked: Sequence[sympy.Symbol]) -> Expr | None:
    """The condition under which a point of the walk counts for any of `folds`; None where all points may."""
    found: list[Expr] = []
    for node, condition in _candidates(folds, frozenset(walked)):
        if condition not in found and all(_is_identity(fold, node) for fold in folds):
            found.append(condition)
    if not found:
        return None
    whole = found[0]
    for condition in found[1:]:
        whole = make_op("and", whole, condition)
    return whole


def _candidates(folds: Sequence[Fold], walked: frozenset[sympy.Symbol]) -> Iterator[tuple[Op, Expr]]:
    """Every `where` with a constant branch, and the condition under which the other branch is taken."""
    for node in postorder(*(arg for fold in folds for arg in fold.args)):
        if not isinstance(node, Op) or node.name != "where":
            continue
        condition, first, second = node.args
        if isinstance(first, Const) == isinstance(second, Const):
            continue
        (condition,) = plain([condition])
        kept = _known(condition if isinstance(second, Const) else negated(condition))
        if kept is not None and (any(loads(kept)) or not free_axes(kept).isdisjoint(walked)):
            yield node, kept


def _known(condition: Expr) -> Expr | None:
    """What `condition` asks of indices, and of integers and bools at indices; None if that is nothing."""
    if isinstance(condition, Op) and condition.name == "and":
        parts = [part for part in map(_known, condition.args) if part is not None]
        return make_op("and", *parts) if len(parts) == 2 else parts[0] if parts else None
    within = postorder(condition)
    if any(isinstance(node, (TileRef, Random)) for node in within):
        return None
    return condition if all(map(_is_told, loads(condition))) else None


def _is_told(load: Load) -> bool:
    """Is this an integer or a bool that a tensor holds at an index?"""
    return load.mask is None and not load.dtype.is_floating_point and not isinstance(load.index[0], Expr)


def _is_identity(fold: Fold, node: Op) -> bool:
    """Does `fold` see its identity wherever `node` chooses its constant?

    Samples that are NaN whatever it chooses say nothing: the logarithm of a sum is not taken of a negative number.
    """
    first, second = node.args[1:]
    constant, other = (first, second) if isinstance(first, Const) else (second, first)
    wanted = 0 if fold.op == "dot" else identity(fold.op, fold.dtype)
    for arg in fold.args:
        chosen, usual = _sampled([_with(arg, node, each) for each in (constant, other)])
        told = ~usual.isnan()
        if int(told.sum()) * 4 >= SAMPLES and bool((chosen == wanted)[told].all()):
            return True
    return False


def _with(arg: Expr, node: Expr, value: Expr) -> Expr:
    return rewrite([arg], lambda expr: value if expr is node else None)[0]


def _sampled(roots: Sequence[Expr]) -> list[torch.Tensor]:
    """`roots` with finite samples in place of what they load and of folds, the same in all of them."""
    generator = torch.Generator().manual_seed(0)
    values: dict[Expr, torch.Tensor] = {}
    for node in postorder(*roots):
        floating = node.dtype.is_floating_point
        if isinstance(node, Const):
            values[node] = torch.full((SAMPLES,), node.value, dtype=torch.float64 if floating else node.dtype)
        elif isinstance(node, Op):
            values[node] = SCALAR_OPS[node.name].meaning(*(values[arg] for arg in node.args))
        elif isinstance(node, Cast):
            values[node] = values[node.arg].to(torch.float64 if floating else node.dtype)
        elif node.dtype is torch.bool:
            values[node] = torch.rand(SAMPLES, generator=generator) < 0.5
        elif not floating:
            values[node] = torch.randint(0, 100, (SAMPLES,), generator=generator).to(node.dtype)
        else:
            values[node] = torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
    return [values[root] for root in roots]
