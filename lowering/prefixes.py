"""Prefixes: where the scans of a kernel stand.

Input: a body without its scans; output: the body with each scan where it is named first.  Along an axis that is walked,
the value of a scan is known only in the loop that walks it: every loop that names it has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusion.lowering.expr import Expr, TileRef, postorder, rewrite
from fusion.lowering.kernel import Loop, Prefix, Stmt, map_values, values_of


def named(values: Sequence[Expr], prefixes: Mapping[str, Prefix]) -> dict[str, None]:
    """The folds that `values` are made of, also by way of scans, and these scans; what is needed first comes first."""
    found: dict[str, None] = {}
    for node in postorder(*values):
        if isinstance(node, TileRef) and node.name not in found:
            if node.name in prefixes:
                found.update(named(prefixes[node.name].args, prefixes))
            found[node.name] = None
    return found


def placed(body: Sequence[Stmt], prefixes: Sequence[Prefix]) -> tuple[Stmt, ...]:
    """`body` with the scans that it names."""
    known = {prefix.name: prefix for prefix in prefixes}
    found: list[Stmt] = []
    standing: set[str] = set()
    for stmt in body:
        inner = stmt.body if isinstance(stmt, Loop) else (stmt,)
        wanted = named([value for part in inner for value in values_of(part)], known)
        needed = [known[name] for name in wanted if name in known]
        walked = [prefix for prefix in needed if isinstance(stmt, Loop) and prefix.along in stmt.axes]
        whole = [prefix for prefix in needed if prefix not in walked and prefix.name not in standing]
        found.extend(whole)
        found.append(_with_own(stmt, walked, standing) if isinstance(stmt, Loop) else stmt)
        standing.update(prefix.name for prefix in needed)
    return tuple(found)


def _with_own(loop: Loop, prefixes: Sequence[Prefix], taken: set[str]) -> Loop:
    """A loop with scans of its own, under names that no other loop has."""
    if not prefixes:
        return loop
    names: dict[str, str] = {}
    for prefix in prefixes:
        name, count = prefix.name, 0
        while name in taken:
            count += 1
            name = f"{prefix.name}_{count}"
        names[prefix.name] = name
        taken.add(name)

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, TileRef) or names.get(node.name, node.name) == node.name:
            return None
        return TileRef(names[node.name], node.dtype)

    own = (replace(p, name=names[p.name], args=tuple(rewrite(p.args, rule))) for p in prefixes)
    return replace(loop, body=(*own, *map_values(loop.body, lambda values: rewrite(values, rule))))
