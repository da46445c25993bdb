"""Merges the accumulators of contractions of which only the sum is needed, as for weights that share a byte.

Input: the statements of a kernel, over axes or over block dimensions; output: the sum of results that are used nowhere
else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusion.lowering.ir.expr import Expr, Op, postorder
from fusion.lowering.ir.kernel import Fold, Loop, Stmt, statements, values_of


@dataclass(frozen=True, slots=True)
class Total:
    """The sum `value` of the results of `folds`, in their order, each of which is used only there."""

    value: Expr
    folds: tuple[Fold, ...]


def total_of(body: Sequence[Stmt], fold: Fold) -> Total | None:
    """Return the largest sum that `fold` is a term of, of contractions of one loop over the same axes; None if there is
    none.
    """
    stmts = list(statements(body))
    roots = [value for stmt in stmts for value in values_of(stmt)]
    nodes = postorder(*roots)
    users = Counter([*roots, *(child for node in nodes for child in node.children())])
    loop = next((stmt for stmt in stmts if isinstance(stmt, Loop) and fold in stmt.body), None)
    if loop is None:
        return None
    dots = {stmt.ref: stmt for stmt in loop.body if isinstance(stmt, Fold) and stmt.op == "dot"}
    for node in reversed(nodes):  # an expression comes after its operands
        terms = list(_terms(node, users))
        folds = [dots[term] for term in terms if term in dots and users[term] == 1]
        alike = {(each.over, each.rows, each.columns, each.dtype, each.carry) for each in folds}
        if fold in folds and len(folds) == len(terms) > 1 and len(alike) == 1:
            return Total(node, tuple(each for each in dots.values() if each in folds))
    return None


def _terms(expr: Expr, users: Counter[Expr]) -> Iterator[Expr]:
    """Yield the terms of a sum, decomposed as far as nothing else needs a partial sum."""
    if not isinstance(expr, Op) or expr.name != "add":
        yield expr
        return
    for arg in expr.args:
        yield from _terms(arg, users) if users[arg] == 1 else (arg,)
