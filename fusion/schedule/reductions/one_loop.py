"""Merges the folds of a cluster into one loop: running values inside, results after it.

Input: folds and writes over named axes, and the loop axes; output: statements, or the reason why one loop is not
enough. Folds over other axes are recomputed in each block.  A fold that needs the result of another one over the loop
axes follows its running value, by the online rule.  The loop may stand in an outer one over the rows, which some folds
reduce: they cross the loop, and their results are stored after both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from fusion.lowering.algebra.conditions import without_bounds
from fusion.lowering.ir.expr import Expr, TileRef, postorder, rewrite
from fusion.lowering.ir.kernel import Fold, Loop, Stmt, Store, map_statements, values_of, with_values
from fusion.lowering.ir.kernel import running as followed
from fusion.lowering.ir.scalar_ops import keeps_position
from fusion.schedule.clusters.expand import Expanded
from fusion.schedule.iteration.axes import indices_of
from fusion.schedule.online import Online, online
from fusion.schedule.reductions.skipped_blocks import counts_where

CROSSES = "a running value cannot be followed beside a fold over an outer loop"

POSITION = "a fold keeps a position, which cannot be followed beside running values"


def one_loop(
    expanded: Expanded,
    looped: Sequence[sympy.Symbol],
    inner: Sequence[sympy.Symbol],
    outer: Sequence[sympy.Symbol] = (),
    *,
    added: bool = False,
) -> tuple[Stmt, ...] | str:
    """Return one loop over `looped`, then the stores, or why one loop is not enough.

    Args:
        inner: axes of loops inside that loop.
        outer: axes of a loop around it.
        added: whether numbers of minus infinity that are added decide which blocks the loop skips.
    """
    loops = set(looped)
    followed_folds = follow(expanded.folds, looped, inner)
    if isinstance(followed_folds, str):
        return followed_folds
    stores: list[Stmt] = []
    crossing: list[Stmt] = []  # stores along the loop, of what is known after the outer one
    for write in expanded.writes:
        value, offset = write.value, write.offset
        roots = [value, offset] if isinstance(offset, Expr) else [value]
        indices = [*indices_of(roots), *([] if isinstance(offset, Expr) else [offset])]
        symbols = {symbol for index in indices for symbol in index.free_symbols}
        if symbols & loops and (not outer or symbols.intersection(outer)):
            return f"{write.buffer} is needed in full, and would be written in a second loop"
        store = Store(write.buffer, offset, replaced([value], followed_folds.results)[0])
        (crossing if symbols & loops else stores).append(store)
    where = counts_where(counting(followed_folds, outer), looped, added=added)
    loop = Loop(tuple(looped), followed_folds.body, where)
    if outer and followed(loop):
        return CROSSES
    body: tuple[Stmt, ...] = (loop, *stores)
    if outer:
        body = (Loop(tuple(outer), body), Loop(tuple(looped), tuple(crossing)))
    return map_statements(body, lambda stmt: stmt if isinstance(stmt, Loop) else _without_bounds(stmt))


def _without_bounds(stmt: Stmt) -> Stmt:
    """Return a statement without the bounds of its conditions, which only determine the blocks that a loop skips."""
    return with_values(stmt, without_bounds(values_of(stmt)))


@dataclass(frozen=True, slots=True)
class Followed:
    """The folds of one loop.

    Attributes:
        body: the statements in the loop, in order.
        running: the folds that run over the loop axes.
        results: the value of each original fold after the loop.
    """

    body: tuple[Stmt, ...]
    running: Mapping[str, Fold]
    results: Mapping[str, Expr]


def counting(followed: Followed, outer: Collection[sympy.Symbol] = ()) -> tuple[Fold, ...]:
    """Return the folds to which a point of the loop may contribute: those over it, and over a loop around it."""
    crossing = (stmt for stmt in followed.body if isinstance(stmt, Fold) and not set(outer).isdisjoint(stmt.over))
    return (*followed.running.values(), *crossing)


def follow(
    folds: Sequence[Fold],
    looped: Sequence[sympy.Symbol],
    inner: Sequence[sympy.Symbol],
    form: Callable[[Fold, Mapping[str, Fold]], Online | str] = online,
) -> Followed | str:
    """Return `folds` as statements of one loop over `looped`, or the reason why one loop is not enough.

    Args:
        form: returns the accumulators of a fold beside the running ones, without complete folds.
    """
    loops = set(looped)
    body: list[Stmt] = []
    running: dict[str, Fold] = {}
    results: dict[str, Expr] = {}
    known: dict[tuple[object, ...], Expr] = {}  # computation → its result, for folds that share one
    for original in folds:
        fold = replace(original, args=replaced(original.args, results))
        key = (fold.op, fold.args, fold.over, fold.dtype)
        if key in known:
            results[fold.name] = known[key]
            continue
        if not loops.intersection(fold.over):
            if _names(fold.args) & running.keys():
                return f"{fold.op} inside a block of a value that is known only after the loop"
            body.append(Loop(fold.over, (fold,)) if set(fold.over) & set(inner) else fold)
            known[key] = fold.ref
            continue
        if keeps_position(fold.op) and running:
            return POSITION
        accumulators = form(fold, running)
        if isinstance(accumulators, str):
            return accumulators
        for part in accumulators.folds:
            body.append(part)
            running[part.name] = part
        results[fold.name] = known[key] = accumulators.value
    if any(keeps_position(fold.op) for fold in running.values()) and followed(Loop(tuple(looped), tuple(body))):
        return POSITION
    return Followed(tuple(body), running, results)


def _names(values: Sequence[Expr]) -> set[str]:
    return {node.name for node in postorder(*values) if isinstance(node, TileRef)}


def replaced(values: Sequence[Expr], results: Mapping[str, Expr]) -> tuple[Expr, ...]:
    """Replace folds by their results in `values`."""

    def rule(node: Expr) -> Expr | None:
        return results.get(node.name) if isinstance(node, TileRef) else None

    return tuple(rewrite(values, rule)) if results else tuple(values)
