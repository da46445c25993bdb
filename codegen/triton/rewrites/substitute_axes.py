"""Places: what becomes of the statements of a kernel once its axes are written as expressions of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy

from fusion.lowering.expr import Expr
from fusion.lowering.indexing import simplify, substitute_all
from fusion.lowering.kernel import Stmt, Store, map_statements, statements, values_of, with_values


def at_places(
    body: Sequence[Stmt], places: Mapping[sympy.Symbol, sympy.Expr], sizes: Mapping[sympy.Symbol, sympy.Expr]
) -> tuple[Stmt, ...]:
    """`body` with axes replaced in all that it reads and writes, at once, because expressions share parts.

    Over which axes a statement goes is left as it is.
    """
    roots = [value for stmt in statements(body) for value in values_of(stmt)]
    moved = dict(zip(roots, substitute_all(roots, places, sizes), strict=True))

    def placed(stmt: Stmt) -> Stmt:
        stmt = with_values(stmt, [moved[value] for value in values_of(stmt)])
        if not isinstance(stmt, Store) or isinstance(stmt.offset, Expr):
            return stmt
        return replace(stmt, offset=simplify(stmt.offset.xreplace(dict(places)), sizes))

    return map_statements(body, placed)


__all__ = ["at_places"]
