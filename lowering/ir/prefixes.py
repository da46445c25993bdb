"""Places scans in a kernel's body.

Input: a body without its scans; output: the body with each scan before its first use.  Along a LOOP axis, the value of
a scan is known only within a loop over that axis: every loop that names it gets its own copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusion.lowering.ir.expr import Expr, TileRef, postorder, rewrite
from fusion.lowering.ir.kernel import Loop, Prefix, Stmt, map_values, values_of


def named(values: Sequence[Expr], prefixes: Mapping[str, Prefix]) -> dict[str, None]:
    """Return the folds and scans that `values` depend on, also through scans, in the order of their dependences."""
    names: dict[str, None] = {}
    for node in postorder(*values):
        if isinstance(node, TileRef) and node.name not in names:
            if node.name in prefixes:
                names.update(named(prefixes[node.name].args, prefixes))
            names[node.name] = None
    return names


def placed(body: Sequence[Stmt], prefixes: Sequence[Prefix]) -> tuple[Stmt, ...]:
    """Insert the scans that `body` names."""
    known = {prefix.name: prefix for prefix in prefixes}
    result: list[Stmt] = []
    placed_names: set[str] = set()
    for stmt in body:
        inner = stmt.body if isinstance(stmt, Loop) else (stmt,)
        wanted = named([value for part in inner for value in values_of(part)], known)
        needed = [known[name] for name in wanted if name in known]
        own = [prefix for prefix in needed if isinstance(stmt, Loop) and prefix.along in stmt.axes]
        before_stmt = [prefix for prefix in needed if prefix not in own and prefix.name not in placed_names]
        result.extend(before_stmt)
        result.append(_with_own(stmt, own, placed_names) if isinstance(stmt, Loop) else stmt)
        placed_names.update(prefix.name for prefix in needed)
    return tuple(result)


def _with_own(loop: Loop, prefixes: Sequence[Prefix], taken: set[str]) -> Loop:
    """Add scans to a loop, under names that no other loop uses."""
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
