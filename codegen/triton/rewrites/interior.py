"""Interior: a loop as it is in blocks in which its condition holds throughout.

What enters is a loop with a `where`; what leaves is the same loop without it, and without the places in its body where
the condition, a part of it that must hold with it, or the opposite of one, is computed for each element.
"""

from __future__ import annotations

from dataclasses import replace

from lowering.conditions import given
from lowering.expr import Expr
from lowering.kernel import Fold, Loop, Prefix, Stmt, statements, values_of, with_values


def unconditional(loop: Loop) -> Loop:
    """`loop` where its condition is known to hold."""
    if loop.where is None:
        return loop
    roots = [value for stmt in statements(loop.body) for value in values_of(stmt)]
    known = dict(zip(roots, given(loop.where, roots), strict=True))
    return replace(loop, body=tuple(_rebuilt(stmt, known) for stmt in loop.body), where=None)


def _rebuilt(stmt: Stmt, known: dict[Expr, Expr]) -> Stmt:
    if isinstance(stmt, Loop):
        where = None if stmt.where is None else known[stmt.where]
        return replace(stmt, body=tuple(_rebuilt(inner, known) for inner in stmt.body), where=where)
    if isinstance(stmt, Fold):
        carry = None if stmt.carry is None else known[stmt.carry]
        return replace(stmt, args=tuple(known[arg] for arg in stmt.args), carry=carry)
    if isinstance(stmt, Prefix):
        return replace(stmt, args=tuple(known[arg] for arg in stmt.args))
    return with_values(stmt, [known[value] for value in values_of(stmt)])
