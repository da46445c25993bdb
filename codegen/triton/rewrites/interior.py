"""Interior: a loop as it is in blocks in which its condition holds throughout.

What enters is a loop with a `where`; what leaves is the same loop without it, and without the places in its body where
the condition, or a part of it that must hold with it, is computed for each element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from lowering.expr import Const, Expr, Op, rewrite
from lowering.kernel import Fold, Loop, Prefix, Stmt, statements, values_of, with_values

_TRUE = Const(True, torch.bool)


def unconditional(loop: Loop) -> Loop:
    """`loop` where its condition is known to hold."""
    if loop.where is None:
        return loop
    truths = frozenset(conjuncts(loop.where))

    def rule(node: Expr) -> Expr | None:
        if node in truths:
            return _TRUE
        if isinstance(node, Op) and node.name in ("where", "and", "or") and _TRUE in node.args:
            return _decided(node)
        return None

    roots = [value for stmt in statements(loop.body) for value in values_of(stmt)]
    known = dict(zip(roots, rewrite(roots, rule), strict=True))
    return replace(loop, body=tuple(_rebuilt(stmt, known) for stmt in loop.body), where=None)


def conjuncts(where: Expr) -> Iterator[Expr]:
    """A condition and all the parts that must hold with it."""
    yield where
    if isinstance(where, Op) and where.name == "and":
        for arg in where.args:
            yield from conjuncts(arg)


def _decided(node: Op) -> Expr | None:
    """A choice, conjunction or disjunction of which one operand is known to hold."""
    if node.name == "where":
        return node.args[1] if node.args[0] is _TRUE else None
    if node.name == "or":
        return _TRUE
    return next((arg for arg in node.args if arg is not _TRUE), _TRUE)


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
