"""Puts the folds of a cluster into one loop: running values inside, results after it.

Input: folds and writes over named axes, and the axes that are walked; output: statements, or the reason why one walk
does not do.  Folds over axes that are not walked are made anew in each block.  A fold that needs the result of another
one over the walked axes follows its running value, by the online rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from fusion.lowering.expr import Expr, TileRef, postorder, rewrite
from fusion.lowering.kernel import Fold, Loop, Stmt, Store
from fusion.lowering.kernel import running as followed
from fusion.lowering.scalar_ops import keeps_position
from fusion.schedule.clusters.expand import Expanded
from fusion.schedule.iteration.axes import indices_of
from fusion.schedule.online import Online, online
from fusion.schedule.reductions.skipped_blocks import counts_where

POSITION = "a fold keeps a position, which cannot be followed beside running values"


def walk(expanded: Expanded, walked: Sequence[sympy.Symbol], inner: Sequence[sympy.Symbol]) -> tuple[Stmt, ...] | str:
    """One loop over `walked`, then the stores.

    Args:
        inner: axes that are walked inside the walk.
    """
    loops = set(walked)
    found = follow(expanded.folds, walked, inner)
    if isinstance(found, str):
        return found
    stores: list[Stmt] = []
    for write in expanded.writes:
        value, offset = write.value, write.offset
        roots = [value, offset] if isinstance(offset, Expr) else [value]
        indices = [*indices_of(roots), *([] if isinstance(offset, Expr) else [offset])]
        if any(index.free_symbols & loops for index in indices):
            return f"{write.buffer} is needed whole, and would be written in a second walk"
        stores.append(Store(write.buffer, offset, replaced([value], found.results)[0]))
    where = counts_where(tuple(found.running.values()), walked)
    return (Loop(tuple(walked), found.body, where), *stores)


@dataclass(frozen=True, slots=True)
class Followed:
    """The folds of one walk.

    Attributes:
        body: what stands in the loop, in order.
        running: the folds among it that run over the walked axes.
        results: what each of the original folds comes to.
    """

    body: tuple[Stmt, ...]
    running: Mapping[str, Fold]
    results: Mapping[str, Expr]


def follow(
    folds: Sequence[Fold],
    walked: Sequence[sympy.Symbol],
    inner: Sequence[sympy.Symbol],
    form: Callable[[Fold, Mapping[str, Fold]], Online | str] = online,
) -> Followed | str:
    """`folds` as they stand in one loop over `walked`, or the reason why one walk does not do.

    Args:
        form: a fold beside the running ones, with accumulators that need no complete fold.
    """
    loops = set(walked)
    body: list[Stmt] = []
    running: dict[str, Fold] = {}
    results: dict[str, Expr] = {}
    made: dict[tuple[object, ...], Expr] = {}  # what two folds would both compute, and what that comes to
    for original in folds:
        fold = replace(original, args=replaced(original.args, results))
        key = (fold.op, fold.args, fold.over, fold.dtype)
        if key in made:
            results[fold.name] = made[key]
            continue
        if not loops.intersection(fold.over):
            if _names(fold.args) & running.keys():
                return f"{fold.op} inside a block of what is known only after the walk"
            body.append(Loop(fold.over, (fold,)) if set(fold.over) & set(inner) else fold)
            made[key] = fold.ref
            continue
        if keeps_position(fold.op) and running:
            return POSITION
        found = form(fold, running)
        if isinstance(found, str):
            return found
        for part in found.folds:
            body.append(part)
            running[part.name] = part
        results[fold.name] = made[key] = found.value
    if any(keeps_position(fold.op) for fold in running.values()) and followed(Loop(tuple(walked), tuple(body))):
        return POSITION
    return Followed(tuple(body), running, results)


def _names(values: Sequence[Expr]) -> set[str]:
    return {node.name for node in postorder(*values) if isinstance(node, TileRef)}


def replaced(values: Sequence[Expr], results: Mapping[str, Expr]) -> tuple[Expr, ...]:
    """`values` with folds replaced by what they come to."""

    def rule(node: Expr) -> Expr | None:
        return results.get(node.name) if isinstance(node, TileRef) else None

    return tuple(rewrite(values, rule)) if results else tuple(values)
