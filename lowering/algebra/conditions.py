"""Simplifies expressions of bools, and expressions under conditions known to hold.

`simpler` is one step, a rule for `rewrite`; `plain` takes all steps there are, `given` also the steps that a condition
allows.  Input and output: expressions with the same value at every point, to the bit: only conditions change, and
choices of which the condition is known.  A branch that is never chosen disappears, with its loads and checks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch

from fusion.lowering.ir.expr import Const, Expr, IndexValue, Load, Op, const, make_op, rewrite
from fusion.lowering.ir.scalar_ops import SCALAR_OPS, ScalarName

_TRUE, _FALSE = Const(True, torch.bool), Const(False, torch.bool)
_COMPARE: Mapping[ScalarName, Callable[[float, float], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}


def plain(roots: Sequence[Expr]) -> list[Expr]:
    """Simplify `roots`: no double negations, choices between true and false, or conditions that constants decide.

    >>> import sympy
    >>> less = Op("lt", (IndexValue(sympy.Symbol("i0")), Const(3, torch.int64)), torch.bool)
    >>> chosen = Op("where", (less, Const(False, torch.bool), Const(True, torch.bool)), torch.bool)
    >>> plain([Op("not", (chosen,), torch.bool)])[0] is less
    True
    """
    return rewrite(roots, simpler)


def given(condition: Expr, roots: Sequence[Expr]) -> list[Expr]:
    """Simplify `roots` under the assumption that `condition` holds.

    >>> import sympy
    >>> i, x = IndexValue(sympy.Symbol("i0")), Load("x", (), torch.float32)
    >>> less, more = (Op(name, (i, Const(3, torch.int64)), torch.bool) for name in ("lt", "ge"))
    >>> given(less, [Op("where", (more, Const(0.0, torch.float32), x), torch.float32)])[0] is x
    True
    """
    known = {negated(part): _FALSE for part in conjuncts(condition)} | dict.fromkeys(conjuncts(condition), _TRUE)
    return rewrite(roots, lambda node: known.get(node) or simpler(node))


def conjuncts(condition: Expr) -> Iterator[Expr]:
    """Yield a condition and all the parts that must hold with it."""
    yield condition
    if isinstance(condition, Op) and condition.name in ("and", "bounded"):
        for arg in condition.args if condition.name == "and" else condition.args[:1]:
            yield from conjuncts(arg)


def without_bounds(roots: Sequence[Expr]) -> list[Expr]:
    """Return `roots` with conditions in place of `bounded` conditions: the same values."""
    return rewrite(roots, lambda node: node.args[0] if isinstance(node, Op) and node.name == "bounded" else None)


def negated(condition: Expr) -> Expr:
    """Negate a condition, pushed inwards except through float comparisons, where NaN makes both sides false."""
    if isinstance(condition, Const):
        return _FALSE if condition.value else _TRUE
    if isinstance(condition, Op):
        if condition.name == "not":
            return condition.args[0]
        negation = SCALAR_OPS[condition.name].negation
        if negation is not None and not condition.args[0].dtype.is_floating_point:
            return Op(negation, condition.args, torch.bool)
        if condition.name in ("and", "or"):
            other: Literal["and", "or"] = "or" if condition.name == "and" else "and"
            return _joined(other, *map(negated, condition.args))
    return make_op("not", condition)


def simpler(node: Expr) -> Expr | None:
    """Simplify `node` by one step, over operands that are simplified already; None if no step applies."""
    if isinstance(node, Load) and isinstance(node.mask, Const):
        return Load(node.buffer, node.index, node.dtype) if node.mask.value else const(0, node.dtype)
    if not isinstance(node, Op):
        return None
    if node.name == "where":
        return _chosen(node)
    if node.name in _COMPARE:
        a, b = map(_number, node.args)
        return None if a is None or b is None else const(_COMPARE[node.name](a, b), torch.bool)
    if node.dtype is not torch.bool or node.name not in ("and", "or", "not"):
        return None
    result = negated(*node.args) if node.name == "not" else _joined(node.name, *node.args)
    return None if result is node else result


def _chosen(node: Op) -> Expr | None:
    """Simplify a choice with a known or negated condition, or one between conditions."""
    condition, first, second = node.args
    if isinstance(condition, Const):
        return first if condition.value else second
    if isinstance(first, Op) and first.name == "where" and first.args[0] is condition:
        return _plain_choice(condition, first.args[1], second)
    if node.dtype is torch.bool and isinstance(first, Const):
        return _joined("or", condition, second) if first.value else _joined("and", negated(condition), second)
    if node.dtype is torch.bool and isinstance(second, Const):
        return _joined("or", negated(condition), first) if second.value else _joined("and", condition, first)
    if isinstance(condition, Op) and condition.name == "not":
        return _plain_choice(condition.args[0], second, first)
    return None


def _plain_choice(condition: Expr, first: Expr, second: Expr) -> Expr:
    chosen = Op("where", (condition, first, second), first.dtype)
    return _chosen(chosen) or chosen


def _joined(name: Literal["and", "or"], a: Expr, b: Expr) -> Expr:
    """Combine two conditions by `and` or `or`, folding constants."""
    for known, other in ((a, b), (b, a)):
        if isinstance(known, Const):
            return other if bool(known.value) is (name == "and") else known
    return Op(name, (a, b), torch.bool)


def _number(expr: Expr) -> int | float | None:
    if isinstance(expr, IndexValue) and expr.index.is_Integer and expr.dtype is torch.int64:
        return int(expr.index)
    return expr.value if isinstance(expr, Const) and type(expr.value) in (int, float) else None
