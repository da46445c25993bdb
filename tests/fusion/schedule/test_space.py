"""Merging iteration spaces: which axes are unified, which are split, and refusals."""

from __future__ import annotations

import pytest
import sympy

from fusion.lowering.indexing import FloorDiv, Mod, axis_symbol, over_symbol
from fusion.lowering.ir.program import Axis
from fusion.schedule.iteration.space import Joined, Space, join

P = [axis_symbol(k) for k in range(4)]
R = [over_symbol(k) for k in range(2)]


def axes(symbols: list[sympy.Symbol], *sizes: int) -> tuple[Axis, ...]:
    return tuple(Axis(s, sympy.Integer(n)) for s, n in zip(symbols, sizes, strict=False))


def ints(*sizes: int) -> list[sympy.Integer]:
    return [sympy.Integer(n) for n in sizes]


def points(space: Space) -> int:
    return int(space.points)


def test_equal_spaces_join_without_algebra() -> None:
    space = Space(axes(P, 4, 5), ())
    joined = join(space, P[:2], Space(axes(P, 4, 5), ()), P[:2], ints(4, 5))
    assert joined == Joined(space, {}, {})


def test_reshape_places_merged_axis() -> None:
    target = Space(axes(P, 2, 4, 8), ())
    joined = join(target, [4 * P[0] + P[1], P[2]], Space(axes(P, 8, 8), ()), P[:2], ints(8, 8))
    assert isinstance(joined, Joined)
    assert joined.moved == {P[0]: 4 * P[0] + P[1], P[1]: P[2]}


def test_divided_index_splits_the_target_axis() -> None:
    target = Space(axes(P, 8, 8), ())
    index = [FloorDiv(P[0], 4), Mod(P[0], 4), P[1]]
    joined = join(target, index, Space(axes(P, 2, 4, 8), ()), P[:3], ints(2, 4, 8))
    assert isinstance(joined, Joined)
    assert [int(a.size) for a in joined.space.parallel] == [2, 4, 8]
    outer, inner = (a.symbol for a in joined.space.parallel[:2])
    assert joined.target == {P[0]: 4 * outer + inner}
    assert joined.moved == {P[0]: outer, P[1]: inner, P[2]: P[1]}


def test_rigid_target_is_never_split() -> None:
    target = Space(axes(P, 8, 8), axes(R, 16), rigid=True)
    joined = join(target, P[:2], Space(axes(P, 2, 4, 8), ()), [4 * P[0] + P[1], P[2]], ints(8, 8))
    assert isinstance(joined, Joined)
    assert joined.space == target
    assert joined.moved == {P[0]: FloorDiv(P[0], 4), P[1]: Mod(P[0], 4), P[2]: P[1]}


def test_a_leftover_axis_is_unified_with_the_reduced_one() -> None:
    row = Space(axes(P, 4), axes(R, 16))
    joined = join(row, P[:1], Space(axes(P, 4, 16), ()), P[:1], ints(4))
    assert isinstance(joined, Joined)
    assert joined.moved == {P[0]: P[0], P[1]: R[0]}


def test_group_norm_splits_channels_into_group_and_rest() -> None:
    group = Space(axes(P, 2, 4), axes(R, 3, 10))
    full = Space(axes(P, 2, 12, 10), ())
    joined = join(group, P[:2], full, [P[0], FloorDiv(P[1], 3)], ints(2, 4))
    assert isinstance(joined, Joined)
    assert joined.moved == {P[0]: P[0], P[1]: 3 * P[1] + R[0], P[2]: R[1]}


def test_one_leftover_axis_counts_the_points_of_several() -> None:
    row = Space(axes(P, 4), axes(R, 3, 5))
    joined = join(row, P[:1], Space(axes(P, 4, 15), ()), P[:1], ints(4))
    assert isinstance(joined, Joined)
    assert joined.moved == {P[0]: P[0], P[1]: 5 * R[0] + R[1]}


def test_several_leftover_axes_split_the_reduced_one() -> None:
    row = Space(axes(P, 4), axes(R, 30))
    moved = Space(axes(P, 4, 2, 3, 5), ())
    joined = join(row, P[:1], moved, P[:1], ints(4))
    assert isinstance(joined, Joined)
    parts = joined.space.reduced
    assert [int(part.size) for part in parts] == [2, 3, 5]
    assert joined.target == {R[0]: 15 * parts[0].symbol + 5 * parts[1].symbol + parts[2].symbol}
    assert joined.moved == {P[0]: P[0], **{P[k + 1]: part.symbol for k, part in enumerate(parts)}}
    rigid = Space(row.parallel, row.reduced, rigid=True)
    assert join(rigid, P[:1], moved, P[:1], ints(4)) == "the axes left over on either side are cut differently"


@pytest.mark.parametrize(
    ("moved", "index", "extents"),
    [
        (Space(axes(P, 4, 17), ()), P[:1], ints(4)),  # another length than the reduced axis
        (Space(axes(P, 4), ()), [P[0] + 1], ints(5)),  # a slice is no rearrangement
        (Space(axes(P, 4, 4), ()), [P[0] + P[1]], ints(7)),  # nor is a sum
    ],
)
def test_refusals_say_why(moved: Space, index: list[sympy.Expr], extents: list[sympy.Expr]) -> None:
    row = Space(axes(P, 4), axes(R, 16))
    assert isinstance(join(row, P[:1], moved, index, extents), str)
