"""Simplifies the loop over the blocks in which its condition holds everywhere.

Input: a loop with a `where`; output: the same loop without it, and with the condition, its conjuncts and their
negations replaced by constants in its body.  Within the inner bounds of a conjunct that has bounds these constants
hold, too; `within_bounds` replaces such conjuncts alone.  Blocks that evaluate the condition take inner bounds as
false: the values selected there are right everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

from fusion.lowering.algebra.conditions import given, negated
from fusion.lowering.ir.expr import Const, Expr, Op, make_op, postorder, rewrite
from fusion.lowering.ir.kernel import Loop, Stmt, map_values, statements, values_of


def unconditional(loop: Loop) -> Loop:
    """Return `loop`, simplified for blocks in which its condition holds, within all inner bounds."""
    if loop.where is None:
        return loop
    return replace(loop, body=_given(_everything(loop.where), loop.body), where=None)


def conditional(loop: Loop) -> Loop:
    """Return `loop`, simplified for blocks in which its condition is evaluated."""
    return within_bounds(loop, ())


def within_bounds(loop: Loop, parts: Collection[Op]) -> Loop:
    """Return `loop`, simplified for blocks within the inner bounds of some parts of its condition: these parts hold.

    The rest of the condition is evaluated, as in `conditional`.
    """
    if loop.where is None:
        return loop
    inside = [part.args[2] for part in parts]
    outside = [negated(inner) for inner in _inner_bounds(loop.where) if inner not in inside]
    known = [*inside, *parts, *outside]
    return replace(loop, body=_given(_all(known), loop.body)) if known else loop


@dataclass(frozen=True, slots=True)
class Selection:
    """A `where` in a loop, its value if the condition of the loop holds, and its constant value otherwise."""

    node: Expr
    inside: Expr
    constant: Expr


def only_selection(loop: Loop) -> Selection | None:
    """Return the only selection that depends on the condition of a loop; None if more than one depends on it."""
    if loop.where is None:
        return None
    inside, outside = unconditional(loop), conditional(loop)
    condition = _everything(loop.where)
    for node in postorder(*(value for stmt in loop.body for value in values_of(stmt))):
        constant = _constant(node)
        if constant is None:
            continue
        (chosen,), (selected,) = given(condition, [node]), _evaluated(loop.where, [node])
        if chosen is not node and _in_place_of(selected, chosen, outside.body) == inside.body:
            return Selection(selected, chosen, constant)
    return None


def _everything(where: Expr) -> Expr:
    """Return the conditions that are true in the interior: the loop's condition, and all inner bounds."""
    return _all([*_inner_bounds(where), where])


def _evaluated(where: Expr, roots: Sequence[Expr]) -> list[Expr]:
    """Return `roots`, simplified for blocks in which the condition is evaluated."""
    outside = [negated(inner) for inner in _inner_bounds(where)]
    return given(_all(outside), roots) if outside else list(roots)


def _all(conditions: Sequence[Expr]) -> Expr:
    return reduce(partial(make_op, "and"), conditions)


def _inner_bounds(where: Expr) -> list[Expr]:
    """Return the inner bounds of the parts of a condition that have bounds."""
    return [part.args[2] for part in postorder(where) if isinstance(part, Op) and part.name == "bounded"]


def _given(condition: Expr, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Return a body under the assumption that `condition` holds."""
    roots = [value for stmt in statements(body) for value in values_of(stmt)]
    known = dict(zip(roots, given(condition, roots), strict=True))
    return map_values(body, lambda values: [known[value] for value in values])


def _in_place_of(node: Expr, other: Expr, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Return a body with `other` in place of `node`."""
    return map_values(body, lambda values: rewrite(values, lambda part: other if part is node else None))


def _constant(selection: Expr) -> Expr | None:
    """Return the constant branch of a `where`; None unless exactly one branch is constant."""
    if not isinstance(selection, Op) or selection.name != "where":
        return None
    constants = [arg for arg in selection.args[1:] if isinstance(arg, Const)]
    return constants[0] if len(constants) == 1 else None
