"""Splits loops over lanes where their text changes (index-set splitting): lanes need no masks and read neighbours.

A concatenation or a padding compares every index with a fixed position; a reflection takes the absolute value of a
distance, a roll the remainder of a sum.  In lanes that needs masks or gathers, for each load on each side; one loop per
side needs neither.  (measured: docs/performance.md, `index_set_splitting`)

Input: a sweep that stores, or folds along other axes than its lanes', the axis of these and the sizes of all axes;
output: the pieces of that axis, each with the sweep simplified by its bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from fusion.codegen.c.plan.loop_fusion import Sweep
from fusion.lowering.algebra.positions import simplify_all
from fusion.lowering.indexing import FloorDiv, Mod, Sizes, coefficient, substitute_all
from fusion.lowering.ir.expr import Const, Expr, IndexValue, Load, Op, postorder
from fusion.lowering.ir.kernel import AnyStmt, KernelAxis, values_of, with_values
from fusion.lowering.ir.scalar_ops import ORDERINGS, SCALAR_OPS, keeps_position

SHORTEST_SPLIT, SHORTEST_PIECE = 48, 16
"""The shortest axis that is split into pieces of any length; and the shortest piece for which a shorter axis is split,
if it is half of the axis at least: pieces have to fill registers."""

MOST_CUTS = 7
"""The most splits: pieces repeat the text of the sweep, so beyond this masks are cheaper."""

MOST_NODES = 200
"""Size of the largest sweep that is repeated."""

_PLACE = sympy.Symbol("place", integer=True, nonnegative=True)
"""The lane, counted from the beginning of its piece."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`sweep`, simplified for the lanes `start ≤ lane < end`."""

    start: int
    end: int
    sweep: Sweep


def split_index_set(sweep: Sweep, lane: KernelAxis, sizes: Sizes) -> tuple[Piece, ...]:
    """Return the pieces of `lane`, in order; none if a split does not pay off.  `sizes`: the sizes of all axes."""
    if sweep.scans or sweep.keeps or not lane.size.is_Integer or lane.size < SHORTEST_PIECE:
        return ()
    if lane.symbol in sweep.over or any(keeps_position(fold.op) for fold in sweep.folds):
        return ()
    nodes = len(postorder(*sweep.roots))
    done: list[Piece] = []
    pending = [Piece(0, int(lane.size), sweep)]
    while pending:
        piece = pending.pop()
        at = min(_changes(piece, lane.symbol), default=None)
        if at is None:
            done.append(piece)
            continue
        if len(done) + len(pending) > MOST_CUTS or nodes * (len(done) + len(pending) + 1) > MOST_NODES:
            return ()
        # the piece that comes first is taken from the stack first
        pending += [_part(piece, lane.symbol, at, piece.end, sizes), _part(piece, lane.symbol, piece.start, at, sizes)]
    longest = max(piece.end - piece.start for piece in done)
    if lane.size < SHORTEST_SPLIT and (longest < SHORTEST_PIECE or 2 * longest < lane.size):
        return ()
    return tuple(done) if len(done) > 1 else ()


def _changes(piece: Piece, lane: sympy.Symbol) -> Iterator[int]:
    """Yield the positions inside a piece at which something in its sweep changes its form."""
    for node in postorder(*piece.sweep.roots):
        for at in (*_sides(node, lane), *(at for index in _indices(node) for at in _wraps(index, piece, lane))):
            if piece.start < at < piece.end:
                yield at


def _sides(node: Expr, lane: sympy.Symbol) -> Iterator[int]:
    """Yield the position from which on a comparison, an absolute value or a bound of the lane has another outcome."""
    if not isinstance(node, Op) or node.dtype not in (torch.bool, torch.int64):
        return
    if node.name == "abs":
        if isinstance(node.args[0], IndexValue):
            yield from _zero(node.args[0].index, lane)
    elif node.name in ORDERINGS or node.name in ("maximum", "minimum"):
        (left, right), name = node.args, SCALAR_OPS[node.name].mirror
        if isinstance(left, Const):
            left, right = right, left
        else:
            name = node.name
        if isinstance(left, IndexValue) and isinstance(right, Const) and right.dtype is left.dtype is torch.int64:
            yield from _zero(left.index - int(right.value) - int(name in ("le", "gt")), lane)


def _zero(distance: sympy.Expr, lane: sympy.Symbol) -> Iterator[int]:
    """Yield the first position at which `distance`, the lane or its negative and a number, is at least 0, or below."""
    step = coefficient(distance, lane)
    if step not in (1, -1):
        return
    rest = distance - step * lane
    if rest.is_Integer:
        yield -int(rest) if step == 1 else int(rest) + 1


def _indices(node: Expr) -> Sequence[sympy.Expr]:
    """Return the indices that a node holds itself."""
    if isinstance(node, Load):
        return [index for index in node.index if isinstance(index, sympy.Expr)]
    return [node.index] if isinstance(node, IndexValue) else []


def _wraps(index: sympy.Expr, piece: Piece, lane: sympy.Symbol) -> Iterator[int]:
    """Yield the lane positions at which a `//` or `%` of the lane starts a new period, if at most `MOST_CUTS`."""
    for atom in index.atoms(Mod, FloorDiv):
        inner, divisor = atom.args
        shift = inner - lane
        if not (shift.is_Integer and divisor.is_Integer):
            continue
        first = (piece.start + int(shift)) // int(divisor) + 1
        last = (piece.end - 1 + int(shift)) // int(divisor)
        if last - first < MOST_CUTS:
            yield from (number * int(divisor) - int(shift) for number in range(first, last + 1))


def _part(piece: Piece, lane: sympy.Symbol, start: int, end: int, sizes: Sizes) -> Piece:
    """Return the lanes from `start` to `end` of a piece, simplified by these bounds."""
    within = {**sizes, _PLACE: sympy.Integer(end - start)}

    def part_of(stmt: AnyStmt) -> AnyStmt:
        moved = simplify_all(substitute_all(values_of(stmt), {lane: _PLACE + start}, within), within)
        return with_values(stmt, substitute_all(moved, {_PLACE: lane - start}, sizes))

    folds, stores = tuple(map(part_of, piece.sweep.folds)), tuple(map(part_of, piece.sweep.stores))
    return Piece(start, end, replace(piece.sweep, folds=folds, stores=stores))
