"""Finds the condition under which a loop may skip blocks that do not contribute.

Input: the folds of a loop; output: a condition (a bool expression), false only at points where every fold sees its
identity: points excluded by a causal mask, a sliding window, document boundaries, or padding.  A `where` with a
constant branch is a candidate; with the constant in its place, the folds are evaluated on samples.  So is a sum with a
number in memory, which hides a point where it is minus infinity.

A condition depends on indices, and on integers and bools in memory.  A generator uses the ones of which a block of the
loop has few values: a vector along the loop or along the rows, or a number.

Masked points are assumed not to contribute, even if the tensors hold infinities or NaN there, as in every attention
kernel.  Eager multiplies them by 0, which would give NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import sympy
import torch

from fusion.lowering.algebra.conditions import negated, plain
from fusion.lowering.ir.expr import (
    Cast,
    Const,
    Expr,
    Load,
    Op,
    Random,
    TileRef,
    const,
    free_axes,
    loads,
    make_op,
    postorder,
    rewrite,
)
from fusion.lowering.ir.kernel import Fold
from fusion.lowering.ir.scalar_ops import SCALAR_OPS, identity

SAMPLES = 64


def counts_where(folds: Sequence[Fold], looped: Sequence[sympy.Symbol], *, added: bool = False) -> Expr | None:
    """Return the condition under which a point contributes to any of `folds`; None if all points may.

    `added`: also conditions on floats that are added.
    """
    conditions: list[Expr] = []
    for node, condition in _candidates(folds, frozenset(looped)):
        if condition not in conditions and all(_selects_identity(fold, node) for fold in folds):
            conditions.append(condition)
    for node, condition in _sums(folds, frozenset(looped)) if added else ():
        if condition not in conditions and vanish_at(folds, node):
            conditions.append(condition)
    if not conditions:
        return None
    conjunction = conditions[0]
    for condition in conditions[1:]:
        conjunction = make_op("and", conjunction, condition)
    return conjunction


def vanish_at(folds: Sequence[Fold], node: Expr) -> bool:
    """Return whether every one of `folds` sees its identity where `node` is minus infinity."""
    return all(_is_identity(fold, node, Const(-math.inf, node.dtype), node) for fold in folds)


def _candidates(folds: Sequence[Fold], looped: frozenset[sympy.Symbol]) -> Iterator[tuple[Op, Expr]]:
    """Yield every `where` with a constant branch, and the condition under which the other branch is taken."""
    for node in postorder(*(arg for fold in folds for arg in fold.args)):
        if not isinstance(node, Op) or node.name != "where":
            continue
        condition, first, second = node.args
        if isinstance(first, Const) == isinstance(second, Const):
            continue
        (condition,) = plain([condition])
        kept = _known(condition if isinstance(second, Const) else negated(condition))
        if kept is not None and (any(loads(kept)) or not free_axes(kept).isdisjoint(looped)):
            yield node, kept


def _sums(folds: Sequence[Fold], looped: frozenset[sympy.Symbol]) -> Iterator[tuple[Op, Expr]]:
    """Yield every sum with a float in memory that varies along a loop, and the condition that it hides nothing."""
    for node in postorder(*(arg for fold in folds for arg in fold.args)):
        if isinstance(node, Op) and node.name == "add":
            for load in filter(None, map(added_number, node.args)):
                if free_axes(load) & looped:
                    yield node, make_op("ne", load, const(-math.inf, load.dtype))


def added_number(arg: Expr) -> Load | None:
    """Return the load of a floating-point number, perhaps converted, at an index that is not itself loaded."""
    load = arg.arg if isinstance(arg, Cast) else arg
    if not isinstance(load, Load) or not load.dtype.is_floating_point or load.mask is not None:
        return None
    return None if any(isinstance(index, Expr) for index in load.index) else load


def _known(condition: Expr) -> Expr | None:
    """Return the part of `condition` that depends on indices, integers and bools alone; None if there is none."""
    if isinstance(condition, Op) and condition.name == "and":
        parts = [part for part in map(_known, condition.args) if part is not None]
        return make_op("and", *parts) if len(parts) == 2 else parts[0] if parts else None
    within = postorder(condition)
    if any(isinstance(node, (TileRef, Random)) for node in within):
        return None
    bounds = condition.args[1:] if isinstance(condition, Op) and condition.name == "bounded" else (condition,)
    return condition if all(map(_is_plain_flag, loads(*bounds))) else None


def is_known(part: Expr) -> bool:
    """Return whether a condition depends on indices, integers and bools alone."""
    return _known(part) is part


def _is_plain_flag(load: Load) -> bool:
    """Return whether this loads an integer or a bool at an index that is not itself loaded."""
    plain = not any(isinstance(index, Expr) for index in load.index)  # a number has no index
    return load.mask is None and not load.dtype.is_floating_point and plain


def _selects_identity(fold: Fold, node: Op) -> bool:
    """Return whether `fold` sees its identity wherever `node` selects its constant."""
    first, second = node.args[1:]
    return _is_identity(fold, node, *((first, second) if isinstance(first, Const) else (second, first)))


def _is_identity(fold: Fold, node: Expr, constant: Expr, other: Expr) -> bool:
    """Return whether `fold` sees its identity wherever `node` is `constant` rather than `other`.

    Samples that are NaN in either case are ignored: the logarithm of a sum is not taken of a negative number.  Loaded
    numbers may be finite: the maximum of a row that is masked out entirely is the constant itself, and all its
    exponentials are 1.
    """
    neutral = 0 if fold.op == "dot" else identity(fold.op, fold.dtype)
    least = constant.value if isinstance(constant, Const) and math.isfinite(constant.value) else None
    for arg in fold.args:
        chosen, usual = _sampled([_with(arg, node, each) for each in (constant, other)])
        valid = ~usual.isnan()
        if int(valid.sum()) * 4 < SAMPLES or not bool((chosen == neutral)[valid].all()):
            continue
        if least is None or bool((_sampled([_with(arg, node, constant)], least)[0] == neutral).all()):
            return True
    return False


def _with(arg: Expr, node: Expr, value: Expr) -> Expr:
    return rewrite([arg], lambda expr: value if expr is node else None)[0]


def _sampled(roots: Sequence[Expr], number: float | None = None) -> list[torch.Tensor]:
    """Evaluate `roots` with samples for loads and folds, the same in all of them: finite, or one `number`."""
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
        elif number is not None:
            values[node] = torch.full((SAMPLES,), float(number), dtype=torch.float64)
        else:
            values[node] = torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
    return [values[root] for root in roots]
