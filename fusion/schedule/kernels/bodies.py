"""Builds the statements of a kernel: folds and stores, in as few loops over the reduced axes as possible."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from fusion.lowering.ir.expr import Expr
from fusion.lowering.ir.kernel import Fold, Loop, Prefix, Role, Stmt, Store, values_of, with_values
from fusion.lowering.ir.prefixes import named, placed
from fusion.lowering.ir.program import Axis
from fusion.schedule.clusters.expand import Expanded, Write
from fusion.schedule.iteration.axes import indices_of
from fusion.schedule.reductions.one_loop import follow, replaced


def body_of(
    expanded: Expanded, parallel: Sequence[Axis], reduced: Sequence[Axis], role: Role, *, follows: bool
) -> tuple[Stmt, ...]:
    """Return the statements over axes of that role; with `follows`, folds may depend on running values."""
    stores = [store_of(write, (*parallel, *reduced)) for write in expanded.writes]
    over = tuple(axis.symbol for axis in reduced)
    if role is Role.WHOLE or not reduced:
        return placed((*expanded.folds, *stores), expanded.prefixes)
    if expanded.prefixes or not follows:
        return _by_levels(expanded.folds, stores, over, expanded.prefixes)
    return _looped(expanded.folds, stores, over)


def store_of(write: Write, axes: Sequence[Axis]) -> Store:
    """Return the store of a write, over the axes in `axes` that it needs."""
    if write.points is None:
        return Store(write.buffer, write.offset, write.value)
    indexed = {symbol for point in write.points for symbol in point.free_symbols} & {axis.symbol for axis in axes}
    own = tuple(sorted(indexed, key=str))
    return Store(write.buffer, write.offset, write.value, write.op, own, write.where)


def _stored_at(store: Store) -> set[sympy.Symbol]:
    """Return the axes over which a store writes."""
    return offset_symbols(store.offset) if store.axes is None else set(store.axes)


def _looped(folds: Sequence[Fold], stores: Sequence[Store], over: tuple[sympy.Symbol, ...]) -> tuple[Stmt, ...]:
    """Use as few loops as possible: one for all folds where the online rule holds, one for stores along the axes."""
    followed = follow(folds, over, ()) if len(folds) > 1 else "nothing to follow"
    if isinstance(followed, str):
        return _by_levels(folds, stores, over)
    after = [with_values(store, replaced(values_of(store), followed.results)) for store in stores]
    per_element = [store for store in after if set(over) & _stored_at(store)]
    rows = [store for store in after if store not in per_element]
    return (Loop(over, followed.body), *rows, *([Loop(over, tuple(per_element))] if per_element else []))


def _by_levels(
    folds: Sequence[Fold],
    stores: Sequence[Store],
    over: tuple[sympy.Symbol, ...],
    prefixes: Sequence[Prefix] = (),
) -> tuple[Stmt, ...]:
    """Use one loop per level of dependence between folds; a store joins the first loop behind all that it needs."""
    level: dict[str, int] = {}
    scans = {prefix.name: prefix for prefix in prefixes}
    loops: dict[int, list[Stmt]] = {}
    after: dict[int, list[Stmt]] = {}

    def needs(*values: Expr) -> int:
        return max((level[name] for name in named(values, scans) if name not in scans), default=0)

    for fold in folds:
        level[fold.name] = needs(*fold.args) + 1
        loops.setdefault(level[fold.name], []).append(fold)
    for store in stores:
        ready = needs(*values_of(store))
        looped = set(over) & _stored_at(store)
        if looped:
            loops.setdefault(ready + 1, []).append(store)
        else:
            after.setdefault(ready, []).append(store)
    body: list[Stmt] = list(after.get(0, ()))
    for k in sorted({*loops, *after} - {0}):
        if k in loops:
            body.append(Loop(over, tuple(loops[k])))
        body.extend(after.get(k, ()))
    return placed(body, prefixes)


def offset_symbols(offset: sympy.Expr | Expr) -> set[sympy.Symbol]:
    """Return the symbols of an offset, or of the indices in a computed one."""
    exprs = indices_of([offset]) if isinstance(offset, Expr) else [offset]
    return {symbol for expr in exprs for symbol in expr.free_symbols}
