"""Interior: a loop over blocks in which its condition holds everywhere.

Input: a loop with a `where`; output: the same loop without it, and with the condition, its conjuncts and their
negations replaced by constants in its body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion.lowering.conditions import given
from fusion.lowering.expr import Const, Expr, Op, postorder, rewrite
from fusion.lowering.kernel import Loop, Stmt, map_values, statements, values_of


def unconditional(loop: Loop) -> Loop:
    """Return `loop` for blocks in which its condition holds."""
    if loop.where is None:
        return loop
    roots = [value for stmt in statements(loop.body) for value in values_of(stmt)]
    known = dict(zip(roots, given(loop.where, roots), strict=True))
    body = map_values(loop.body, lambda values: [known[value] for value in values])
    return replace(loop, body=body, where=None)


def only_selection(loop: Loop) -> Op | None:
    """Return the selection that is all which the condition of a loop decides; None if it decides more.

    Where the condition holds, the value of the selection is that of its branch which is no constant.
    """
    if loop.where is None:
        return None
    inside = unconditional(loop)
    for node in postorder(*(value for stmt in loop.body for value in values_of(stmt))):
        chosen = branch(node)
        if chosen is not None and _in_place_of(node, chosen, loop.body) == inside.body:
            assert isinstance(node, Op)
            return node
    return None


def _in_place_of(node: Expr, other: Expr, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Return a body with `other` in place of `node`."""
    return map_values(body, lambda values: rewrite(values, lambda part: other if part is node else None))


def branch(selection: Expr) -> Expr | None:
    """Return the branch of a selection that is no constant; None if both are, or none is, or for other expressions."""
    if not isinstance(selection, Op) or selection.name != "where":
        return None
    branches = [arg for arg in selection.args[1:] if not isinstance(arg, Const)]
    return branches[0] if len(branches) == 1 else None
