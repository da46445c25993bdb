"""Substitution of axes: the statements of a kernel with its axes written as expressions of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy

from fusion.lowering.expr import Expr
from fusion.lowering.indexing import simplify, substitute_all
from fusion.lowering.kernel import Stmt, Store, map_statements, statements, values_of, with_values


def substitute_axes(
    body: Sequence[Stmt], indices: Mapping[sympy.Symbol, sympy.Expr], sizes: Mapping[sympy.Symbol, sympy.Expr]
) -> tuple[Stmt, ...]:
    """Return `body` with axes replaced in all values and offsets, at once, because expressions share parts.

    The axes that a statement folds or loops over are left as they are.
    """
    roots = [value for stmt in statements(body) for value in values_of(stmt)]
    substituted = dict(zip(roots, substitute_all(roots, indices, sizes), strict=True))

    def rewritten(stmt: Stmt) -> Stmt:
        stmt = with_values(stmt, [substituted[value] for value in values_of(stmt)])
        if not isinstance(stmt, Store) or isinstance(stmt.offset, Expr):
            return stmt
        return replace(stmt, offset=simplify(stmt.offset.xreplace(dict(indices)), sizes))

    return map_statements(body, rewritten)


__all__ = ["substitute_axes"]
