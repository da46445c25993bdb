"""Computes running values of a loop one after the other, in loops of their own.

    for r: m = max(x[r]), s = sum(exp(x[r] - m), carried by exp(before - m))

becomes

    for r: m = max(x[r])
    for r: s = sum(exp(x[r] - m))

The first form reads a row once, the second one needs no corrections.  What a fold carries is what it would be if the
running value had had its present value from the start: with the final value, no correction is left.

Input: a kernel; output: an equal one whose loops have no running values, or None if a fold depends on earlier values
of another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusion.lowering.ir.expr import TileRef, postorder
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Stmt, loop_folds, running


def apart(kernel: Kernel) -> Kernel | None:
    """Return `kernel` without running values; None if that cannot be."""
    body: list[Stmt] = []
    for stmt in kernel.body:
        loops = [stmt] if not isinstance(stmt, Loop) or not running(stmt) else _loops_of(stmt)
        if loops is None:
            return None
        body += loops
    return replace(kernel, body=tuple(body))


def _loops_of(loop: Loop) -> list[Loop] | None:
    """Return loops whose folds use complete results of earlier ones; None if a fold uses values before the current
    block, or the loop has other statements.
    """
    folds = loop_folds(loop)
    before = {fold.before for fold in folds}
    if len(folds) < len(loop.body) or any(node in before for fold in folds for node in postorder(*fold.args)):
        return None
    return [replace(loop, body=tuple(group)) for group in _by_need(folds)]


def _by_need(folds: tuple[Fold, ...]) -> Iterator[list[Fold]]:
    """Yield groups of folds without corrections, each of which needs only the results of earlier groups."""
    group: list[Fold] = []
    for fold in folds:
        named = {node.name for node in postorder(*fold.args) if isinstance(node, TileRef)}
        if not named.isdisjoint(other.name for other in group):
            yield group
            group = []
        group.append(replace(fold, carry=None))
    yield group


__all__ = ["apart"]
