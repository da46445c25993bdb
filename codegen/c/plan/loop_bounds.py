"""Restricts loops to the range in which folds have an effect, so that lanes need no masks.

The padding of a window is a fold's identity.  Lanes would test each point for it, and compilers do not vectorise a
condition that is the same for all lanes.  A loop over only those lanes where the condition holds needs no test.  Input:
a sweep that only folds, along other axes than its lanes; output: the sweep simplified to where all of its folds have an
effect, and the bounds of that region: comparisons of affine indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from fusion.codegen.c.plan.loop_fusion import Sweep
from fusion.codegen.c.text.indices import Names, affine, index_text
from fusion.codegen.c.text.nest import Extent, Namespace
from fusion.lowering.algebra.conditions import simpler
from fusion.lowering.indexing import FloorDiv, coefficient, symbols_of
from fusion.lowering.ir.expr import Cast, Const, Expr, Load, Op, const, free_axes, postorder, rewrite
from fusion.lowering.ir.kernel import Fold
from fusion.lowering.ir.scalar_ops import CHECKED, ORDERINGS, identity, keeps_position

_NEVER = torch.iinfo(torch.int64).max
"""The position after all others."""


@dataclass(frozen=True, slots=True)
class Busy:
    """A sweep that was simplified for the range in which all `limits` are ≥ 0; outside, its folds have no effect."""

    sweep: Sweep
    limits: tuple[sympy.Expr, ...]


def busy(sweep: Sweep, lane: sympy.Symbol) -> Busy | None:
    """Return the range in which `sweep`, vectorised along `lane`, has an effect; None unless comparisons decide it."""
    if not sweep.folds or sweep.stores or sweep.keeps or sweep.scans or lane in sweep.over:
        return None
    order = postorder(*sweep.roots)
    if any(is_check(node) and lane in free_axes(node) for node in order):
        return None  # eager checks each index, whatever its use
    conditions = {}
    for node in order:
        limit = limit_of(node, lane)
        if limit is not None and all(is_idle(fold, node) for fold in sweep.folds):
            conditions[node] = limit
    if not conditions:
        return None

    def rule(node: Expr) -> Expr | None:
        return const(True, torch.bool) if node in conditions else simpler(node)

    folds = tuple(replace(fold, args=tuple(rewrite(fold.args, rule))) for fold in sweep.folds)
    unmasked = set(postorder(*(arg for fold in folds for arg in fold.args))).difference(order)
    if any((isinstance(node, Load) or is_check(node)) and lane not in free_axes(node) for node in unmasked):
        return None  # the same in all lanes: it is loaded or checked before their loop, also if that is empty
    return Busy(replace(sweep, folds=folds), tuple(dict.fromkeys(conditions.values())))


def is_check(node: Expr) -> bool:
    """Return whether a node raises an error at the launch where an index is out of range."""
    return isinstance(node, Op) and node.name == CHECKED


def limit_of(node: Expr, lane: sympy.Symbol) -> sympy.Expr | None:
    """Return an expression that is at least 0 where a comparison of indices holds, if it is affine in the lane."""
    if not isinstance(node, Op) or node.name not in ORDERINGS or node.args[0].dtype is not torch.int64:
        return None
    left, right = map(affine, node.args)
    if left is None or right is None:
        return None
    above = left - right if node.name in ("gt", "ge") else right - left
    limit = _undivided(sympy.expand_mul(above - int(node.name in ("lt", "gt"))), lane)
    weight = coefficient(limit, lane)
    return limit if weight is not None and weight.is_Integer else None


def _undivided(limit: sympy.Expr, lane: sympy.Symbol) -> sympy.Expr:
    """Return `limit` without division, at least 0 at the same points: ⌊a/k⌋ ≥ m where a ≥ k·m.

    >>> i, m = sympy.symbols("i m", integer=True)
    >>> _undivided(FloorDiv(i + 1, 2) - m, i), _undivided(m - FloorDiv(i + 1, 2), i)
    (i - 2*m + 1, -i + 2*m)
    """
    for term in sympy.Add.make_args(limit):
        sign, part = term.as_coeff_Mul()
        if isinstance(part, FloorDiv) and lane in symbols_of(part) and abs(sign) == 1:
            whole, divisor = part.args
            rest = limit - term
            if divisor.is_Integer and lane not in symbols_of(rest):
                bound = whole + divisor * rest if sign == 1 else divisor * rest + divisor - 1 - whole
                return sympy.expand_mul(bound)
    return limit


def is_idle(fold: Fold, condition: Expr, *, holds: bool = False) -> bool:
    """Return whether the arguments of `fold` are its identity wherever a condition does not hold, or wherever it does.

    `holds`: which of the two.
    """
    args = rewrite(fold.args, lambda node: const(holds, torch.bool) if node is condition else simpler(node))
    identities = [identity(fold.op, fold.args[0].dtype), *([_NEVER] if keeps_position(fold.op) else [])]
    return all(_value(arg) == start for arg, start in zip(args, identities, strict=True))


def _value(arg: Expr) -> bool | int | float | None:
    """Return the constant value of an expression, if all sides of its selects agree."""
    if isinstance(arg, Cast):
        return _value(arg.arg)
    if isinstance(arg, Op) and arg.name == "where":
        first, second = map(_value, arg.args[1:])
        return first if first == second else None
    return arg.value if isinstance(arg, Const) else None


def within(
    limits: Sequence[sympy.Expr], lane: sympy.Symbol, extent: Extent, names: Names, space: Namespace
) -> tuple[list[str], Extent]:
    """Return lines before a loop over lanes, and its extent, restricted to where all `limits` are at least 0."""
    start, end, holds = extent.start, extent.end, []
    for limit in limits:
        weight = coefficient(limit, lane)
        assert weight is not None
        rest = sympy.expand_mul(limit - weight * lane)
        # For a negative number C's quotient is too large, but at most 0, where lanes begin at the earliest.
        if weight > 0:
            start = f"imax({start}, ({index_text(weight - 1 - rest, names)})/{weight})"
        elif weight < 0:
            end = f"imin({end}, ({index_text(rest - weight, names)})/{-weight})"
        else:
            holds.append(f"({index_text(limit, names)} >= 0)")
    first, last = space.fresh("first"), space.fresh("last")
    end = f"{' & '.join(holds)} ? {end} : {first}" if holds else end
    lines = [f"const int64_t {first} = {start};", f"const int64_t {last} = {end};"]
    return lines, replace(extent, start=first, end=last, filled=False)


__all__ = ["Busy", "busy", "is_check", "is_idle", "limit_of", "within"]
