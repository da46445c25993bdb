"""Where folds change nothing, so that lanes need no masks.

What lies in the padding of a window counts as what a fold begins with.  Lanes would ask that of each point, and a
condition that is the same for all of them, compilers do not put into lanes at all.  A loop over those lanes where the
condition holds asks nothing.  Input: a sweep that only folds, along other axes than its lanes; output: the sweep as it
is where all of its folds change something, and where that is: comparisons of affine indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from fusion.codegen.c.text.indices import Names, affine, index_text
from fusion.codegen.c.text.nest import Extent, Namespace
from fusion.codegen.c.walks.sweeps import Sweep
from fusion.lowering.checks import CHECKED
from fusion.lowering.conditions import simpler
from fusion.lowering.expr import Cast, Const, Expr, Load, Op, const, free_axes, postorder, rewrite
from fusion.lowering.indexing import FloorDiv, coefficient, symbols_of
from fusion.lowering.kernel import Fold
from fusion.lowering.scalar_ops import identity, keeps_position

_NEVER = torch.iinfo(torch.int64).max
"""The position that comes after all others."""


@dataclass(frozen=True, slots=True)
class Busy:
    """`sweep` as it is where each of `limits` is at least 0; elsewhere none of its folds changes anything."""

    sweep: Sweep
    limits: tuple[sympy.Expr, ...]


def busy(sweep: Sweep, lane: sympy.Symbol) -> Busy | None:
    """Where `sweep` changes something, if comparisons say that; its lanes run along `lane`."""
    if not sweep.folds or sweep.stores or sweep.keeps or sweep.scans or lane in sweep.over:
        return None
    order = postorder(*sweep.roots)
    if any(_is_check(node) and lane in free_axes(node) for node in order):
        return None  # eager looks at each position, whatever becomes of it
    found = {}
    for node in order:
        limit = _limit(node, lane)
        if limit is not None and all(_is_idle(fold, node) for fold in sweep.folds):
            found[node] = limit
    if not found:
        return None

    def rule(node: Expr) -> Expr | None:
        return const(True, torch.bool) if node in found else simpler(node)

    folds = tuple(replace(fold, args=tuple(rewrite(fold.args, rule))) for fold in sweep.folds)
    unmasked = set(postorder(*(arg for fold in folds for arg in fold.args))).difference(order)
    if any((isinstance(node, Load) or _is_check(node)) and lane not in free_axes(node) for node in unmasked):
        return None  # the same in all lanes, it is read or asked before their loop, also where that has none to run
    return Busy(replace(sweep, folds=folds), tuple(dict.fromkeys(found.values())))


def _is_check(node: Expr) -> bool:
    return isinstance(node, Op) and node.name == CHECKED


def _limit(node: Expr, lane: sympy.Symbol) -> sympy.Expr | None:
    """What is at least 0 where a comparison of indices holds, if it is affine in the lane."""
    if not isinstance(node, Op) or node.name not in ("lt", "le", "gt", "ge") or node.args[0].dtype is not torch.int64:
        return None
    left, right = map(affine, node.args)
    if left is None or right is None:
        return None
    above = left - right if node.name in ("gt", "ge") else right - left
    limit = _undivided(sympy.expand_mul(above - int(node.name in ("lt", "gt"))), lane)
    weight = coefficient(limit, lane)
    return limit if weight is not None and weight.is_Integer else None


def _undivided(limit: sympy.Expr, lane: sympy.Symbol) -> sympy.Expr:
    """`limit`, or what is at least 0 at the same points: ⌊a/k⌋ is at least m where a is at least k·m.

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


def _is_idle(fold: Fold, condition: Expr) -> bool:
    """Is what `fold` takes in what it begins with wherever a condition does not hold?"""
    args = rewrite(fold.args, lambda node: const(False, torch.bool) if node is condition else simpler(node))
    begun = [identity(fold.op, fold.args[0].dtype), *([_NEVER] if keeps_position(fold.op) else [])]
    return all(_value(arg) == start for arg, start in zip(args, begun, strict=True))


def _value(arg: Expr) -> bool | int | float | None:
    """The number that an expression is, whatever is chosen in it."""
    if isinstance(arg, Cast):
        return _value(arg.arg)
    if isinstance(arg, Op) and arg.name == "where":
        first, second = map(_value, arg.args[1:])
        return first if first == second else None
    return arg.value if isinstance(arg, Const) else None


def within(
    limits: Sequence[sympy.Expr], lane: sympy.Symbol, extent: Extent, names: Names, space: Namespace
) -> tuple[list[str], Extent]:
    """Lines to stand before a loop over lanes, and how far it runs, where all `limits` are at least 0."""
    start, end, holds = extent.start, extent.end, []
    for limit in limits:
        weight = coefficient(limit, lane)
        assert weight is not None
        rest = sympy.expand_mul(limit - weight * lane)
        # Of a negative number C's quotient is too large, but no larger than 0, where lanes begin at the earliest.
        if weight > 0:
            start = f"imax({start}, ({index_text(weight - 1 - rest, names)})/{weight})"
        elif weight < 0:
            end = f"imin({end}, ({index_text(rest - weight, names)})/{-weight})"
        else:
            holds.append(f"({index_text(limit, names)} >= 0)")
    first, last = space.fresh("first"), space.fresh("last")
    end = f"{' & '.join(holds)} ? {end} : {first}" if holds else end
    lines = [f"const int64_t {first} = {start};", f"const int64_t {last} = {end};"]
    return lines, Extent(extent.name, first, last, extent.size, extent.slot)


__all__ = ["Busy", "busy", "within"]
