"""Splits loops over lanes so that masks disappear.

A concatenation or a padding compares every index with a fixed position.  In lanes that needs masks, for each load on
each side; one loop per side needs none.  Input: a sweep that only stores and the axis of its lanes; output: the pieces
of that axis, each with the sweep simplified for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from fusion.codegen.c.plan.sweeps import Sweep
from fusion.lowering.conditions import simpler
from fusion.lowering.expr import Const, Expr, IndexValue, Op, const, postorder, rewrite
from fusion.lowering.kernel import KernelAxis, Store, values_of, with_values
from fusion.lowering.scalar_ops import ScalarName

SHORTEST = 64
"""The shortest axis that is split: the pieces have to fill registers."""

MOST_CUTS = 7
"""The most splits: pieces repeat the text of the sweep, so beyond this masks are cheaper."""

MOST_NODES = 200
"""Size of the largest sweep that is repeated."""

_MIRRORED: dict[ScalarName, ScalarName] = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


@dataclass(frozen=True, slots=True)
class Piece:
    """`sweep`, simplified for the lanes `start ≤ lane < end`."""

    start: int
    end: int
    sweep: Sweep


def cut(sweep: Sweep, lane: KernelAxis) -> tuple[Piece, ...]:
    """Return the pieces of `lane`; none if it is better not split."""
    if sweep.folds or sweep.scans or sweep.keeps or not lane.size.is_Integer or lane.size < SHORTEST:
        return ()
    order = postorder(*sweep.roots)
    sides = {node: side for node in order if (side := _side(node, lane)) is not None}
    size = int(lane.size)
    positions = sorted({position for position, _ in sides.values() if 0 < position < size})
    if not positions or len(positions) > MOST_CUTS or len(order) * len(positions) > MOST_NODES:
        return ()
    bounds = (0, *positions, size)
    return tuple(_piece(sweep, sides, *pair) for pair in pairwise(bounds))


def _side(node: Expr, lane: KernelAxis) -> tuple[int, bool] | None:
    """Return `(p, below)` if `node` compares the lane: below p, or (not `below`) at or above it."""
    if not isinstance(node, Op) or node.name not in _MIRRORED:
        return None
    (left, right), name = node.args, node.name
    if isinstance(left, Const):
        left, right, name = right, left, _MIRRORED[name]
    if not (isinstance(left, IndexValue) and isinstance(right, Const) and right.dtype is left.dtype is torch.int64):
        return None
    shift = left.index - lane.symbol
    if not shift.is_Integer:
        return None
    position = int(right.value) - int(shift) + (name in ("le", "gt"))
    return position, name in ("lt", "le")


def _piece(sweep: Sweep, sides: dict[Expr, tuple[int, bool]], start: int, end: int) -> Piece:
    def rule(node: Expr) -> Expr | None:
        if node in sides:
            position, below = sides[node]
            return const((start < position) is below, torch.bool)
        return simpler(node)

    def rewritten(store: Store) -> Store:
        return with_values(store, rewrite(values_of(store), rule))

    return Piece(start, end, replace(sweep, stores=tuple(map(rewritten, sweep.stores))))
