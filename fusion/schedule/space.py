"""Spaces: the axes that a cluster's nodes share, and how two spaces become one.

A cluster walks one space: some parallel axes and some reduced ones.  Every node of the cluster is *placed* in it:
each of the node's own axes is an expression over the space's axes.  To join two clusters is to find such expressions
for all nodes of one in the space of the other.  The equation that ties them is a shared tensor: the index at which
one side produces (or reads) it equals the index at which the other reads it.

What enters are two spaces and the two index maps; what leaves is the joined space and the moved axes, or the reason why
there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy

from lowering.indexing import ZERO, FloorDiv, Mod, Sizes, invert, simplify, split_points
from lowering.program import Axis

Placement: TypeAlias = Mapping[sympy.Symbol, sympy.Expr]
"""Axis of a node → expression over the axes of its cluster's space."""


@dataclass(frozen=True, slots=True)
class Space:
    """Parallel and reduced axes.  A `rigid` space (of a contraction) keeps its axes: they are never split.

    Attributes:
        held: parallel axes that every program holds whole (see `streams.py`).
        private: axes that only contractions inside the cluster run over; nothing outside sees them.
    """

    parallel: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    rigid: bool = False
    held: frozenset[sympy.Symbol] = frozenset()
    private: tuple[Axis, ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (*self.parallel, *self.reduced)

    @property
    def sizes(self) -> dict[sympy.Symbol, sympy.Expr]:
        return {axis.symbol: axis.size for axis in (*self.axes, *self.private)}

    @property
    def streamed(self) -> bool:
        """Does the kernel make tiles that it walks at once?"""
        return bool(self.private)

    @property
    def points(self) -> sympy.Expr:
        return sympy.Mul(*(axis.size for axis in self.axes))


@dataclass(frozen=True, slots=True)
class Joined:
    """Two spaces made one: the space, and what became of the axes of either (only the axes that changed)."""

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
    target_split = {} if target.rigid else _splits(target, target_index)
    moved_split = {} if moved.rigid else _splits(moved, moved_index)
    whole_target, target = target, _split_space(target, target_split)
    moved_axes = _split_space(moved, moved_split)
    target_sizes, moved_sizes = target.sizes, moved_axes.sizes
    at = [place(index, target_split, target_sizes) for index in target_index]
    values = tuple(sympy.Symbol(f"v{k}", integer=True, nonnegative=True) for k in range(len(extents)))
    inverse = invert(
        [place(index, moved_split, moved_sizes) for index in moved_index],
        values,
        extents,
        [axis.symbol for axis in moved_axes.axes],
        moved_sizes,
    )
    if inverse is None:
        return "the axes do not unify: one is not a rearrangement of the other"
    given = dict(zip(values, at, strict=True))
    solution: dict[sympy.Symbol, sympy.Expr] = {
        axis: place(expr, given, target_sizes) for axis, expr in inverse.axes.items()
    }
    used = frozenset[sympy.Symbol]().union(*(index.free_symbols for index in at))
    free = [axis for axis in moved_axes.axes if axis.symbol in inverse.free]
    if target.rigid and moved.rigid:  # two contractions: what only the other operands span is kept by both
        kept = [axis for axis in free if axis in moved.parallel]
        beside = _beside(kept, [axis for axis in target.parallel if axis.symbol not in used])
        if beside is None:
            return "the axes that the two contractions keep have different sizes"
        solution.update(beside)
        free = [axis for axis in free if axis not in kept]
    matched = _match(free, target, used)
    if isinstance(matched, str):
        return matched
    target, extra_split, pairs = matched
    if extra_split:
        target_split = {
            **{axis: place(expr, extra_split, target.sizes) for axis, expr in target_split.items()},
            **{axis: expr for axis, expr in extra_split.items() if axis in whole_target.sizes},
        }
        solution = {axis: place(expr, extra_split, target.sizes) for axis, expr in solution.items()}
    solution.update(pairs)
    result = {
        axis.symbol: place(moved_split.get(axis.symbol, axis.symbol), solution, target.sizes) for axis in moved.axes
    }
    return Joined(target, target_split, result)


def place(expr: sympy.Expr, placement: Placement, sizes: Sizes) -> sympy.Expr:
    """`expr` with axes replaced, simplified under the bounds of the new axes."""
    if not placement:
        return expr
    if expr.is_Symbol:
        return placement.get(expr, expr)
    return simplify(expr.xreplace(dict(placement)), sizes)


def _plainly_equal(
    target: Space, target_index: Sequence[sympy.Expr], moved: Space, moved_index: Sequence[sympy.Expr]
) -> bool:
    """Do both sides walk the same axes at the same index?  The ordinary case, settled without algebra."""
    if any(a is not b and a != b for a, b in zip(target_index, moved_index, strict=True)):
        return False
    if not all(index.is_Symbol or index == 0 for index in target_index):
        return False
    if moved.parallel != target.parallel[: len(moved.parallel)]:
        return False
    if moved.reduced == target.reduced:
        return moved.parallel == target.parallel
    return not moved.reduced and moved.parallel == target.parallel


def _splits(space: Space, index: Sequence[sympy.Expr]) -> dict[sympy.Symbol, sympy.Expr]:
    """The axes to split so that `index` is free of `//` and `%`, each as a sum over its parts."""
    if not any(expr.has(FloorDiv, Mod) for expr in index):
        return {}
    found: dict[sympy.Symbol, sympy.Expr] = {}
    for axis in space.axes:
        points = split_points(index, axis.symbol, axis.size)
        if points:
            found[axis.symbol] = _whole(_parts(axis, points), points)
    return found


def _parts(axis: Axis, points: Sequence[int]) -> list[Axis]:
    """The axes that `axis` becomes when split at strides `points`, outermost first."""
    bounds = [1, *points, int(axis.size)]
    parts = []
    for k in range(len(points) + 1):
        symbol = sympy.Symbol(f"{axis.symbol}_{k}", integer=True, nonnegative=True)
        parts.append(Axis(symbol, sympy.Integer(bounds[k + 1] // bounds[k])))
    return parts[::-1]


def _whole(parts: Sequence[Axis], points: Sequence[int]) -> sympy.Expr:
    """The axis that was split at strides `points`, as a sum over its parts (outermost first)."""
    return sympy.Add(*(stride * part.symbol for stride, part in zip([*reversed(points), 1], parts, strict=True)))


def _split_space(space: Space, splits: Placement) -> Space:
    if not splits:
        return space

    def divided(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        result: list[Axis] = []
        for axis in axes:
            if axis.symbol not in splits:
                result.append(axis)
                continue
            strides = sorted(
                ((term.as_coeff_Mul()) for term in sympy.Add.make_args(splits[axis.symbol])),
                key=lambda part: int(part[0]),
            )
            bounds = [int(stride) for stride, _ in strides] + [int(axis.size)]
            parts = [Axis(symbol, sympy.Integer(bounds[k + 1] // bounds[k])) for k, (_, symbol) in enumerate(strides)]
            result.extend(reversed(parts))
        return tuple(result)

    return Space(divided(space.parallel), divided(space.reduced), space.rigid)


def _beside(kept: Sequence[Axis], others: Sequence[Axis]) -> dict[sympy.Symbol, sympy.Expr] | None:
    """Pair axes with others of the same sizes, in order; None if they are not as many of the same sizes."""
    wanted, there = ([axis for axis in axes if axis.size != 1] for axes in (kept, others))
    if [axis.size for axis in wanted] != [axis.size for axis in there]:
        return None
    ones: dict[sympy.Symbol, sympy.Expr] = {axis.symbol: ZERO for axis in kept if axis.size == 1}
    return ones | {axis.symbol: other.symbol for axis, other in zip(wanted, there, strict=True)}


def _match(
    free: Sequence[Axis], target: Space, used: frozenset[sympy.Symbol]
) -> tuple[Space, Placement, Placement] | str:
    """Pair axes that the shared tensor leaves open with reduced axes of the target that it leaves open too."""
    wanted = [axis for axis in free if axis.size != 1]
    pairs: dict[sympy.Symbol, sympy.Expr] = {axis.symbol: ZERO for axis in free if axis.size == 1}
    if not wanted:
        return target, {}, pairs
    open_axes = [axis for axis in target.reduced if axis.symbol not in used and axis.size != 1]
    if not open_axes:
        return "one side has axes that the other does not walk"
    if [axis.size for axis in wanted] == [axis.size for axis in open_axes]:
        pairs.update({axis.symbol: other.symbol for axis, other in zip(wanted, open_axes, strict=True)})
        return target, {}, pairs
    if sympy.Mul(*(a.size for a in wanted)) != sympy.Mul(*(a.size for a in open_axes)):
        return "the axes left over on either side have different sizes"
    if len(wanted) == 1:
        linear: sympy.Expr = ZERO
        for axis in open_axes:
            linear = linear * axis.size + axis.symbol
        pairs[wanted[0].symbol] = sympy.expand_mul(linear)
        return target, {}, pairs
    if len(open_axes) == 1 and not target.rigid and all(axis.size.is_Integer for axis in wanted):
        points: list[int] = []
        for axis in reversed(wanted[1:]):
            points.append(int(axis.size) * (points[-1] if points else 1))
        whole = open_axes[0]
        parts = _parts(whole, points)
        split = {whole.symbol: _whole(parts, points)}
        pairs.update({axis.symbol: part.symbol for axis, part in zip(wanted, parts, strict=True)})
        return _split_space(target, split), split, pairs
    return "the axes left over on either side are cut differently"
