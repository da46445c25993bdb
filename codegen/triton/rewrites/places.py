"""Places: what becomes of the statements of a kernel once its axes are written as expressions of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy

from lowering.expr import Expr
from lowering.indexing import simplify, substitute_all
from lowering.kernel import Fold, Loop, Prefix, Stmt, statements, values_of, with_values


def at_places(
    body: Sequence[Stmt], places: Mapping[sympy.Symbol, sympy.Expr], sizes: Mapping[sympy.Symbol, sympy.Expr]
) -> tuple[Stmt, ...]:
    """`body` with axes replaced in all that it reads and writes, at once, because expressions share parts.

    Over which axes a statement goes is left as it is.
    """
    roots = [value for stmt in statements(body) for value in values_of(stmt)]
    moved = dict(zip(roots, substitute_all(roots, places, sizes), strict=True))

    def rebuilt(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Loop):
            where = None if stmt.where is None else moved[stmt.where]
            return replace(stmt, body=tuple(map(rebuilt, stmt.body)), where=where)
        if isinstance(stmt, Fold):
            carry = None if stmt.carry is None else moved[stmt.carry]
            return replace(stmt, args=tuple(moved[arg] for arg in stmt.args), carry=carry)
        if isinstance(stmt, Prefix):
            return replace(stmt, args=tuple(moved[arg] for arg in stmt.args))
        store = with_values(stmt, [moved[value] for value in values_of(stmt)])
        if isinstance(store.offset, Expr):
            return store
        return replace(store, offset=simplify(store.offset.xreplace(dict(places)), sizes))

    return tuple(map(rebuilt, body))


__all__ = ["at_places"]
