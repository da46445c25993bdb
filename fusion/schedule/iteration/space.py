"""Unifies iteration spaces: the axes that a cluster's nodes share.

A cluster has one iteration space: some parallel axes and some reduced ones.  Every node of the cluster is *placed* in
it: each of the node's own axes is an expression over the space's axes.  To join two clusters is to solve for such
expressions for all nodes of one in the space of the other.  The equation is a shared tensor: the index at which one
side writes (or reads) it equals the index at which the other reads it.

Input: two spaces and the two index maps; output: the joined space and the moved axes, or the reason why there is none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import TypeAlias

import sympy

from fusion.lowering.indexing import ZERO, FloorDiv, Mod, Sizes, invert, simplify, split_points
from fusion.lowering.ir.expr import Expr
from fusion.lowering.ir.program import Axis

Placement: TypeAlias = Mapping[sympy.Symbol, sympy.Expr]
"""Axis of a node → expression over the axes of its cluster's space."""


@dataclass(frozen=True, slots=True)
class Space:
    """Parallel and reduced axes.  A `rigid` space (of a contraction) keeps its axes: they are never split.

    Attributes:
        held: parallel axes that every program holds whole (see `chained/`, `clusters/legality/rows_and_columns.py`).
        private: axes over which only contractions inside the cluster reduce; nothing outside depends on them.
        outer: parallel axes that a program loops over, around the reduced ones, as contractions of the cluster reduce
            over them too (see `chained/crossing.py`).
        where: the points that belong to rows, if the last part of the rows is shorter than the others.
    """

    parallel: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    rigid: bool = False
    held: frozenset[sympy.Symbol] = frozenset()
    private: tuple[Axis, ...] = ()
    outer: frozenset[sympy.Symbol] = frozenset()
    where: Expr | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The parallel axes, then the reduced ones."""
        return (*self.parallel, *self.reduced)

    @property
    def spread(self) -> tuple[Axis, ...]:
        """The parallel axes whose points are programs of their own."""
        return tuple(axis for axis in self.parallel if axis.symbol not in self.held | self.outer)

    @property
    def sizes(self) -> dict[sympy.Symbol, sympy.Expr]:
        """The size of each axis, also of the private ones."""
        return {axis.symbol: axis.size for axis in (*self.axes, *self.private)}

    @property
    def chained(self) -> bool:
        """Whether the kernel loops over tiles that it computes itself."""
        return bool(self.private)

    @property
    def folds_both_ways(self) -> bool:
        """Whether each program loops over rows that it holds in full, reduces each row and accumulates column sums."""
        return bool(self.held) and not self.private

    @property
    def points(self) -> sympy.Expr:
        """The number of points that its axes span."""
        return sympy.Mul(*(axis.size for axis in self.axes))


@dataclass(frozen=True, slots=True)
class Joined:
    """Two joined spaces: the new space, and the replacements of the axes of either (only the axes that changed)."""

    space: Space
    target: Placement
    moved: Placement


def join(
    target: Space,
    target_index: Sequence[sympy.Expr],
    moved: Space,
    moved_index: Sequence[sympy.Expr],
    extents: Sequence[sympy.Expr],
) -> Joined | str:
    """Express the axes of `moved` over `target`: both indices name the same element of a tensor of shape `extents`.

    Returns:
        The joined space, or why there is none.
    """
    if _plainly_equal(target, target_index, moved, moved_index):
        return Joined(target, {}, {})
    return _unified(target, tuple(target_index), moved, tuple(moved_index), tuple(extents))


@lru_cache(maxsize=1 << 12)
def _unified(
    target: Space,
    target_index: tuple[sympy.Expr, ...],
    moved: Space,
    moved_index: tuple[sympy.Expr, ...],
    extents: tuple[sympy.Expr, ...],
) -> Joined | str:
    """Join by algebra; cached, as layers of a model repeat, and clusters are tried again when they have grown."""
    target_cut, moved_cut = _cut(target, target_index), _cut(moved, moved_index)
    solved = _solved(moved_cut, target_cut, extents)
    if solved is None:
        return "the axes do not unify: one is not a rearrangement of the other"
    solution, free = solved
    used = frozenset[sympy.Symbol]().union(*(index.free_symbols for index in target_cut.index))
    if target.rigid and moved.rigid:  # two contractions: both keep the axes that only the other operands span
        kept = [axis for axis in free if axis in moved.parallel]
        paired = _in_order(kept, [axis for axis in target.parallel if axis.symbol not in used])
        if paired is None:
            return "the axes that the two contractions keep have different sizes"
        solution.update(paired)
        free = [axis for axis in free if axis not in kept]
    matched = _match(free, target_cut.space, used)
    if isinstance(matched, str):
        return matched
    pairs, splits = matched
    if splits:
        target_cut = _refined(target_cut, splits)
        solution = {axis: place(expr, splits, target_cut.space.sizes) for axis, expr in solution.items()}
    solution.update(pairs)
    sizes = target_cut.space.sizes
    result = {axis.symbol: place(moved_cut.parts.get(axis.symbol, axis.symbol), solution, sizes) for axis in moved.axes}
    return Joined(target_cut.space, target_cut.parts, result)


def place(expr: sympy.Expr, placement: Placement, sizes: Sizes) -> sympy.Expr:
    """Substitute axes in `expr` and simplify under the bounds of the new axes."""
    if not placement:
        return expr
    if isinstance(expr, sympy.Symbol):
        return placement.get(expr, expr)
    return simplify(expr.xreplace(dict(placement)), sizes)


def fresh(letter: str, taken: Collection[sympy.Symbol]) -> sympy.Symbol:
    """Return an axis symbol that is not taken."""
    number = len(taken)
    while (symbol := sympy.Symbol(f"{letter}{number}", integer=True, nonnegative=True)) in taken:
        number += 1
    return symbol


def _plainly_equal(
    target: Space, target_index: Sequence[sympy.Expr], moved: Space, moved_index: Sequence[sympy.Expr]
) -> bool:
    """Return whether both sides have the same axes at the same index: the common case, without algebra."""
    if any(a is not b and a != b for a, b in zip(target_index, moved_index, strict=True)):
        return False
    if moved.reduced == target.reduced:
        return moved.parallel == target.parallel
    symbols_only = all(index.is_Symbol or index == 0 for index in target_index)
    return symbols_only and not moved.reduced and moved.parallel == target.parallel


@dataclass(frozen=True, slots=True)
class _Cut:
    """A space of which some axes are split.

    Attributes:
        space: the new space, with the parts of an axis in its place.
        parts: the axes that were split, each as a sum over its parts.
        index: an index of the old space, over the axes of `space`.
    """

    space: Space
    parts: Placement
    index: tuple[sympy.Expr, ...]


def _cut(space: Space, index: Sequence[sympy.Expr]) -> _Cut:
    """Split the axes of `space` so that `index` is free of `//` and `%`, unless it is rigid."""
    parts = {} if space.rigid else _splits(space, index)
    divided = _split_space(space, parts)
    sizes = divided.sizes
    return _Cut(divided, parts, tuple(place(expr, parts, sizes) for expr in index))


def _refined(cut: _Cut, splits: Placement) -> _Cut:
    """Split axes of a cut space again: parts become sums of smaller parts, whole axes sums of parts."""
    divided = _split_space(cut.space, splits)
    sizes = divided.sizes
    parts = {axis: place(expr, splits, sizes) for axis, expr in cut.parts.items()}
    of_parts = frozenset[sympy.Symbol]().union(*(expr.free_symbols for expr in cut.parts.values()))
    parts |= {axis: expr for axis, expr in splits.items() if axis not in of_parts}
    return _Cut(divided, parts, tuple(place(expr, splits, sizes) for expr in cut.index))


def _solved(
    moved: _Cut, target: _Cut, extents: Sequence[sympy.Expr]
) -> tuple[dict[sympy.Symbol, sympy.Expr], list[Axis]] | None:
    """Return the axes of `moved` over those of `target` where both indices are equal, and the undetermined axes."""
    values = tuple(sympy.Symbol(f"v{k}", integer=True, nonnegative=True) for k in range(len(extents)))
    axes, sizes = moved.space.axes, target.space.sizes
    inverse = invert(moved.index, values, extents, [axis.symbol for axis in axes], moved.space.sizes)
    if inverse is None:
        return None
    substitution = dict(zip(values, target.index, strict=True))
    solution = {axis: place(expr, substitution, sizes) for axis, expr in inverse.axes.items()}
    return solution, [axis for axis in axes if axis.symbol in inverse.free]


def _splits(space: Space, index: Sequence[sympy.Expr]) -> dict[sympy.Symbol, sympy.Expr]:
    """Return the axes to split so that `index` is free of `//` and `%`, each as a sum over its parts."""
    if not any(expr.has(FloorDiv, Mod) for expr in index):
        return {}
    splits: dict[sympy.Symbol, sympy.Expr] = {}
    for axis in space.axes:
        points = split_points(index, axis.symbol, axis.size)
        if points:
            splits[axis.symbol] = _recombined(_parts(axis, points), points)
    return splits


def _parts(axis: Axis, points: Sequence[int]) -> list[Axis]:
    """Return the axes that `axis` becomes when split at strides `points`, outermost first."""
    bounds = [1, *points, int(axis.size)]
    parts = []
    for k in range(len(points) + 1):
        symbol = sympy.Symbol(f"{axis.symbol}_{k}", integer=True, nonnegative=True)
        parts.append(Axis(symbol, sympy.Integer(bounds[k + 1] // bounds[k])))
    return parts[::-1]


def _recombined(parts: Sequence[Axis], points: Sequence[int]) -> sympy.Expr:
    """Return the axis that was split at strides `points`, as a sum over its parts (outermost first)."""
    return sympy.Add(*(stride * part.symbol for stride, part in zip([*reversed(points), 1], parts, strict=True)))


def _split_space(space: Space, splits: Placement) -> Space:
    if not splits:
        return space

    def divided(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        parts_of_axes = (_terms(axis, splits[axis.symbol]) if axis.symbol in splits else (axis,) for axis in axes)
        return tuple(part for parts in parts_of_axes for part in parts)

    return Space(divided(space.parallel), divided(space.reduced), space.rigid)


def _terms(axis: Axis, whole: sympy.Expr) -> list[Axis]:
    """Return the parts of `axis`, whose sum is `whole`, outermost first: each ends at the stride of the next."""
    strides: dict[sympy.Symbol, int] = {}
    for term in sympy.Add.make_args(whole):
        stride, symbol = term.as_coeff_Mul()
        assert isinstance(symbol, sympy.Symbol), "a part is an axis"
        strides[symbol] = int(stride)
    parts = sorted(strides, key=strides.__getitem__, reverse=True)
    ends = [int(axis.size), *(strides[symbol] for symbol in parts)]
    return [Axis(symbol, sympy.Integer(end // strides[symbol])) for symbol, end in zip(parts, ends, strict=False)]


def _in_order(free: Sequence[Axis], others: Sequence[Axis]) -> dict[sympy.Symbol, sympy.Expr] | None:
    """Pair axes with others of the same sizes, in order; None if their sizes differ."""
    longer, others_longer = _longer(free), _longer(others)
    if [axis.size for axis in longer] != [axis.size for axis in others_longer]:
        return None
    return _at_zero(free) | {axis.symbol: other.symbol for axis, other in zip(longer, others_longer, strict=True)}


def _match(free: Sequence[Axis], target: Space, used: frozenset[sympy.Symbol]) -> tuple[Placement, Placement] | str:
    """Pair axes that the shared tensor leaves undetermined with such reduced axes of the target.

    Pairs have the same sizes in order; else one axis is all axes of the other side together.

    Returns:
        The replacements of the axes and the splits of the target's axes, or why they do not pair.
    """
    open_axes, target_axes = _longer(free), _longer(axis for axis in target.reduced if axis.symbol not in used)
    if not open_axes:
        return _at_zero(free), {}
    if not target_axes:
        return "one side has axes that the other does not have"
    if (pairs := _in_order(free, target_axes)) is not None:
        return pairs, {}
    if sympy.Mul(*(axis.size for axis in open_axes)) != sympy.Mul(*(axis.size for axis in target_axes)):
        return "the axes left over on either side have different sizes"
    if len(open_axes) == 1:
        return _at_zero(free) | {open_axes[0].symbol: _position(target_axes)}, {}
    if len(target_axes) == 1 and not target.rigid and all(axis.size.is_Integer for axis in open_axes):
        points = [*accumulate((int(axis.size) for axis in reversed(open_axes[1:])), mul)]
        parts = _parts(target_axes[0], points)
        pairs = {axis.symbol: part.symbol for axis, part in zip(open_axes, parts, strict=True)}
        return _at_zero(free) | pairs, {target_axes[0].symbol: _recombined(parts, points)}
    return "the axes left over on either side are cut differently"


def _longer(axes: Iterable[Axis]) -> list[Axis]:
    """Return the axes that have more than one point."""
    return [axis for axis in axes if axis.size != 1]


def _at_zero(axes: Iterable[Axis]) -> dict[sympy.Symbol, sympy.Expr]:
    """Map the axes of size 1 to 0."""
    return {axis.symbol: ZERO for axis in axes if axis.size == 1}


def _position(axes: Sequence[Axis]) -> sympy.Expr:
    """Return the row-major number of a point of all axes."""
    number: sympy.Expr = ZERO
    for axis in axes:
        number = number * axis.size + axis.symbol
    return sympy.expand_mul(number)
