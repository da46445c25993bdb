"""Rewrites exponentials as powers of 2, with the preceding constants folded into one multiplication.

Input: a body whose results are rounded so much that the last bits of an exponential are invisible; output: an equal one
with fewer operations for each element of a tile.  The hardware computes powers of 2 only:

    exp(x · c - y)               →  exp2(x · (c · log₂e) - y · log₂e)       one multiplication and subtraction at once
    where(m, x · c, -inf)        →  where(m, x, -inf) · c                   for c > 0, so that the rule above applies
    t = max(x · c), … t …        →  t = max(x), … t · c …                   for c > 0: once a row, not for each element
    tile / row                   →  tile · (1 / row)                        likewise

Without a contraction the gain is in denormals alone, which Triton's `exp` preserves with three more instructions, and
`exp2` does not.  They are invisible in the exponential of an element minus the maximum of its row, next to the 1 of the
maximum (measured: docs/performance.md, `exponentials`).  Such an exponential is at most 1, and their sum at least 1, so
that

    exp(x - m - log(sum))           →  exp2(…) · (1 / sum)                  the exponential that the sum needs as well
    exp2(…) · (1 / sum) · row       →  exp2(…) · ((1 / sum) · row)          once a row

unless x - m - log(sum) is needed for more, and would have to be held as well.

Only tiles are rewritten: the subtrahend, usually the maximum of a row, is multiplied as it is.  Where both would be
infinite after the multiplication and not before, as in rows masked with the least float32 or bfloat16, the factor is
one half: numbers of that size are equal, or differ by more than the range of a power of 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fusion.codegen.triton.rewrites.denormals import is_below
from fusion.lowering.ir.expr import Const, Expr, Load, Op, TileRef, make_op, postorder, rewrite
from fusion.lowering.ir.kernel import (
    Fold,
    Prefix,
    Stmt,
    map_statements,
    map_values,
    statements,
    values_of,
    with_values,
)

_LOG2E = math.log2(math.e)

_HUGE = 2.0**127
"""Numbers below it stay finite times log₂e; numbers above are multiples of 2^103, half of which is -∞ for a power of 2.
"""


def in_powers_of_two(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Return `body` with every float32 exponential as a power of 2, and factors moved past the maxima and minima they
    scale.
    """
    factors: dict[str, float] = {}
    products = {stmt.name for stmt in statements(body, Fold) if stmt.op == "dot"}

    def is_tile(value: Expr) -> bool:
        return any(isinstance(node, TileRef) and node.name in products for node in postorder(value))

    def rule(node: Expr) -> Expr | None:
        if isinstance(node, TileRef) and node.name in factors:
            return _times(node, factors[node.name])
        if not isinstance(node, Op) or node.dtype is not torch.float32:
            return None
        left, right = (node.args[0], node.args[-1])
        if node.name == "truediv" and is_tile(left) and not is_tile(right) and not isinstance(right, Const):
            return Op("mul", (left, make_op("truediv", Const(1.0, right.dtype), right)), torch.float32)
        return _rewritten(node, is_tile)

    def rebuilt(stmt: Stmt) -> Stmt:
        assert not isinstance(stmt, Prefix), "a kernel with a contraction has no scan"
        stmt = with_values(stmt, rewrite(values_of(stmt), rule))
        if not isinstance(stmt, Fold) or stmt.op not in ("max", "min") or stmt.carry is not None:
            return stmt
        scaled = _scaled(stmt.args[0])
        if scaled is None:
            return stmt
        factors[stmt.name] = scaled[1]
        return replace(stmt, args=(scaled[0],))

    return map_statements(body, rebuilt)


def softmax_in_powers_of_two(body: Sequence[Stmt], is_rounded: Callable[[Expr], bool]) -> tuple[Stmt, ...]:
    """Return `body` with the exponentials exp(x - max(x)) that satisfy `is_rounded` as powers of 2."""
    softmax = _Softmax(body)

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Op) or node.dtype is not torch.float32:
            return None
        if node.name == "exp":
            return softmax.exponential(node) if is_rounded(node) else None
        return softmax.product(node)

    return map_values(body, lambda values: rewrite(values, rule)) if softmax.maxima else tuple(body)


class _Softmax:
    """The folds of the softmax of a body, and the exponentials that are rewritten so far.

    Attributes:
        maxima: the maxima of rows.
        sums: the sums of exp(x - max(x)), at least 1 for each row whose maximum is finite.
        powers: the exponentials that are rewritten.
        needed: the differences that are read by more than exponentials.
    """

    def __init__(self, body: Sequence[Stmt]) -> None:
        folds = list(statements(body, Fold))
        self.maxima = [fold for fold in folds if fold.op == "max"]
        self.sums = {fold.ref for fold in folds if fold.op == "sum" and self._is_softmax(fold)}
        self.powers: set[Expr] = set()
        self.needed = _needed_beside_exponentials(body)

    def _is_softmax(self, fold: Fold) -> bool:
        (term, *_) = fold.args
        return isinstance(term, Op) and any(is_below(term, top) and fold.over == top.over for top in self.maxima)

    def exponential(self, node: Op) -> Expr | None:
        """Return exp(x - m) as a power of 2, and exp(x - m - log(sum)) as one times 1 / sum; else None."""
        distance, total = _divided(node)
        top = next((top for top in self.maxima if is_below(distance, top)), None)
        if top is None:
            return None
        if total is None or not self._is_sum(total) or node.args[0] in self.needed:
            power = make_op("exp2", _times(node.args[0], _LOG2E))
        else:
            share = make_op("truediv", Const(1.0, total.dtype), total)
            power = make_op("mul", make_op("exp2", _times(distance.args[0], _LOG2E)), share)
        self.powers.add(power)
        return power

    def product(self, node: Op) -> Expr | None:
        """Return exp2(…) / sum as exp2(…) · (1 / sum), and that times a value as exp2(…) · ((1 / sum) · value), which
        is computed once a row where the value is a row's; else None.
        """
        if node.name == "truediv" and node.args[0] in self.powers and self._is_sum(node.args[1]):
            power, total = node.args
            return make_op("mul", power, make_op("truediv", Const(1.0, total.dtype), total))
        for scaled, factor in (node.args, node.args[::-1]) if node.name == "mul" else ():
            if scaled in self.powers and isinstance(scaled, Op) and scaled.name == "mul":
                power, share = scaled.args
                return make_op("mul", power, make_op("mul", share, factor))
        return None

    def _is_sum(self, total: Expr) -> bool:
        """Return whether a value is a sum of exponentials, or NaN where the maximum is not finite."""
        if isinstance(total, Op) and total.name == "where" and isinstance(total.args[1], Const):
            total = total.args[2] if math.isnan(float(total.args[1].value)) else total
        return total in self.sums


def _divided(node: Op) -> tuple[Op, Expr | None]:
    """Return exp(d) and s for exp(d - log(s)); any other exponential as it is, and None."""
    distance = node.args[0]
    if isinstance(distance, Op) and distance.name == "sub":
        first, second = distance.args
        if isinstance(second, Op) and second.name == "log":
            return make_op("exp", first), second.args[0]
    return node, None


def _needed_beside_exponentials(body: Sequence[Stmt]) -> set[Expr]:
    """Return the differences that something reads beside an exponential."""
    roots = [value for stmt in statements(body) for value in values_of(stmt)]
    readers = [node for node in postorder(*roots) if not (isinstance(node, Op) and node.name == "exp")]
    read = {child for node in readers for child in node.children()} | set(roots)
    return {node for node in read if isinstance(node, Op) and node.name == "sub"}


def _rewritten(node: Op, is_tile: Callable[[Expr], bool]) -> Expr | None:
    """Return the exponential of a difference as a power of 2, or None."""
    if node.name != "exp" or not isinstance(node.args[0], Op) or node.args[0].name != "sub":
        return None
    a, b = node.args[0].args
    if not is_tile(a):
        return make_op("exp2", _times(node.args[0], _LOG2E))
    unscaled, factor = _scaled(a) or (a, 1.0)
    if not _may_be_huge(a):
        return make_op("exp2", make_op("sub", _times(unscaled, factor * _LOG2E), _times(b, _LOG2E)))
    is_small = make_op("lt", make_op("abs", b), Const(_HUGE, torch.float32))
    base = make_op("where", is_small, Const(_LOG2E, torch.float32), Const(0.5, torch.float32))
    return make_op("exp2", make_op("sub", make_op("mul", unscaled, _times(base, factor)), make_op("mul", b, base)))


def _may_be_huge(tile: Expr) -> bool:
    """Return whether a tile loads floats with the range of float32, or has a finite constant that is as large."""
    for node in postorder(tile):
        if isinstance(node, Load) and node.dtype in (torch.float32, torch.bfloat16, torch.float64):
            return True
        if isinstance(node, Const) and node.dtype.is_floating_point and _HUGE <= abs(float(node.value)) < math.inf:
            return True
    return False


def _scaled(expr: Expr) -> tuple[Expr, float] | None:
    """Return (a cheaper expression, a positive factor) whose product is `expr`, infinite where `expr` is; or None."""
    if not isinstance(expr, Op) or expr.dtype is not torch.float32:
        return None
    if expr.name in ("mul", "truediv"):
        a, b = expr.args
        if isinstance(a, Const) and expr.name == "mul":
            a, b = b, a
        if isinstance(b, Const) and 0.0 < float(b.value) < math.inf:
            return a, float(b.value) if expr.name == "mul" else 1.0 / float(b.value)
    if expr.name == "where":
        mask, *choices = expr.args
        ends = [isinstance(choice, Const) and math.isinf(float(choice.value)) for choice in choices]
        if any(ends) and (scaled := _scaled(choices[ends.index(False)] if False in ends else choices[0])) is not None:
            parts = [choice if end else scaled[0] for choice, end in zip(choices, ends, strict=True)]
            return make_op("where", mask, *parts), scaled[1]
    return None


def _times(expr: Expr, factor: float) -> Expr:
    """Return `expr · factor`, with constants multiplied."""
    if factor == 1.0:
        return expr
    if isinstance(expr, Const):
        return Const(float(expr.value) * factor, torch.float32)
    if isinstance(expr, Op) and expr.name == "mul" and isinstance(expr.args[1], Const):
        return _times(expr.args[0], float(expr.args[1].value) * factor)
    return make_op("mul", expr, Const(factor, torch.float32))
