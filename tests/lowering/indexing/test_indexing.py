"""Index arithmetic against Python's own integers: random expressions, random bounds, whole boxes of small views."""

from __future__ import annotations

import itertools
import math

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.lowering.indexing import (
    FloorDiv,
    Inverse,
    Mod,
    axis_symbol,
    bounds,
    coefficient,
    flatten,
    invert,
    over_symbol,
    replace_axes,
    simplify,
    split_points,
    substitute,
)
from fusion.lowering.ir.expr import Cast, Expr, IndexValue, Load, Op, postorder
from tests.lowering.random_indices import (
    AXES,
    LENGTH,
    Box,
    Built,
    Point,
    boxes,
    expressions,
    points,
    some_points,
    value,
)

many_cases = settings(max_examples=400)

# simplify, bounds -----------------------------------------------------------------------------------------------------


@many_cases
@given(expressions(), boxes())
def test_simplify_keeps_the_value(built: Built, box: Box) -> None:
    simplified = simplify(built[0], box)
    for point in some_points(box, 1):
        assert value(simplified, point) == built[1].at(point)


@many_cases
@given(expressions(symbolic=True), boxes(symbolic=True), st.integers(1, 9))
def test_simplify_keeps_the_value_for_any_length(built: Built, box: Box, length: int) -> None:
    simplified = simplify(built[0], box)
    for point in some_points(box, length):
        assert value(simplified, point) == built[1].at(point)


@given(expressions(), boxes())
def test_simplify_is_done_at_once(built: Built, box: Box) -> None:
    once = simplify(built[0], box)
    assert simplify(once, box) == once


@given(expressions(), boxes())
def test_bounds_hold(built: Built, box: Box) -> None:
    result = bounds(built[0], box)
    assert result is not None
    for point in some_points(box, 1):
        assert result[0] <= built[1].at(point) <= result[1]


@given(st.permutations(AXES), boxes(), st.lists(st.sampled_from([1, 2, 5, -3]), min_size=4, max_size=4))
def test_bounds_are_reached_when_no_symbol_repeats(order: list[sympy.Symbol], box: Box, scales: list[int]) -> None:
    a, b, c, d = (scale * axis for scale, axis in zip(scales, order, strict=True))
    expr = FloorDiv(a + b + 3, 4) + c * d
    reached = [value(expr, point) for point in points(box)]
    assert bounds(expr, box) == (min(reached), max(reached))


def test_results_of_simplify() -> None:
    b, s, h, _ = AXES
    sizes = {b: sympy.Integer(4), s: LENGTH, h: sympy.Integer(8)}
    linear = 8 * LENGTH * b + 8 * s + h  # a [4, s0, 8] tensor in row-major order
    assert simplify(FloorDiv(linear, 8 * LENGTH), sizes) == b
    assert simplify(Mod(linear, 8 * LENGTH), sizes) == 8 * s + h
    assert simplify(Mod(FloorDiv(linear, 8), LENGTH), sizes) == s
    assert simplify(Mod(linear, 8), sizes) == h
    assert simplify(FloorDiv(h - 8, 8), sizes) == -1
    assert simplify(Mod(h - 8, 8), sizes) == h
    assert simplify(Mod(9 * s + h, 8), sizes) == Mod(s + h, 8)
    assert simplify(Mod(s - 9 * h, 8), sizes) == Mod(s - h, 8)
    assert simplify(Mod(Mod(s, 16) + h, 8), sizes) == Mod(s + h, 8)
    assert simplify(FloorDiv(s, 4 * LENGTH), sizes) == 0
    assert simplify(LENGTH * (Mod(s, 4) + 4 * FloorDiv(s, 4)), sizes) == LENGTH * s


def test_simplify_sees_factors_of_a_length_less_one() -> None:
    """Rows of all but the last of s positions, [b, s - 1, 12] flattened and cut again."""
    i, r = axis_symbol(0), axis_symbol(1)
    s, t = sympy.symbols("s t", integer=True, positive=True)
    known, factor = {i: sympy.Integer(12), r: 3 * (s - 1)}, {i: t, r: 3 * (s - 1)}
    for width, sizes in ((sympy.Integer(12), known), (t, factor)):
        place, divisor = sympy.expand(i + width * r), sympy.expand(width * (s - 1))
        assert simplify(FloorDiv(place, divisor), sizes) == FloorDiv(r, s - 1)
        assert simplify(Mod(place, divisor), sizes) == sympy.expand(i + width * Mod(r, s - 1))


def test_text_of_an_index_is_unambiguous() -> None:
    i, j = AXES[:2]
    assert str(4 * FloorDiv(i, 8)) == "4*(i0//8)"
    assert str(FloorDiv(4 * i + j, 8) + 1) == "(4*i0 + i1)//8 + 1"
    assert str(FloorDiv(i, 2 * LENGTH)) == "i0//(2*s0)"


# Substitution ---------------------------------------------------------------------------------------------------------


@given(expressions(), st.lists(expressions(), min_size=4, max_size=4), boxes())
def test_replace_axes_composes(built: Built, replacements: list[Built], box: Box) -> None:
    """Read `built` at axes that are themselves expressions of the axes: all are replaced at the same time."""
    replaced = replace_axes(built[0], {a: r[0] for a, r in zip(AXES, replacements, strict=True)}, box)
    assert isinstance(replaced, sympy.Expr)
    for point in some_points(box, 1):
        inner = {a: r[1].at(point) for a, r in zip(AXES, replacements, strict=True)}
        assert value(replaced, point) == built[1].at(inner)


def in_python(expr: Expr, point: Point, gathered: int) -> int:
    """An int64 expression whose loads all give `gathered`."""
    done: dict[Expr, int] = {}
    for node in postorder(expr):
        if isinstance(node, IndexValue):
            done[node] = value(node.index, point)
        elif isinstance(node, Op):
            a, b = (done[arg] for arg in node.args)
            done[node] = {
                "add": lambda a, b: a + b,
                "mul": lambda a, b: a * b,
                "floordiv": lambda a, b: a // b,
                "remainder": lambda a, b: a % b,
            }[node.name](a, b)
        else:
            done[node] = gathered
    return done[expr]


@given(expressions(), boxes(), st.integers(0, 20))
def test_a_gathered_axis_lifts_the_index_to_an_expression(built: Built, box: Box, gathered: int) -> None:
    load = Load("table", (AXES[1],), torch.int64)
    replaced = replace_axes(built[0], {AXES[0]: load, AXES[2]: AXES[2] + 1}, box)
    for point in some_points(box, 1)[:10]:
        outer = {**point, AXES[0]: gathered, AXES[2]: point[AXES[2]] + 1}
        result = in_python(replaced, point, gathered) if isinstance(replaced, Expr) else value(replaced, point)
        assert result == built[1].at(outer)


def test_substitute_keeps_the_dtype_of_an_index_value() -> None:
    axis = AXES[0]
    load = Load("table", (AXES[1],), torch.int64)
    narrow = IndexValue(axis, torch.int32)
    assert substitute(narrow, {axis: load}, {}) is Cast(load, torch.int32)
    assert substitute(narrow, {axis: AXES[1]}, {}) is IndexValue(AXES[1], torch.int32)


def test_substitute_returns_the_same_object_when_nothing_changes() -> None:
    root = Op("neg", (Load("x", (AXES[0],), torch.float32),), torch.float32)
    assert substitute(root, {AXES[1]: AXES[2]}, {}) is root


# Structure ------------------------------------------------------------------------------------------------------------


@st.composite
def regroupings(draw: st.DrawFn) -> tuple[list[sympy.Expr], list[int], Box]:
    """A reshape-permute-reshape: the old dimensions as expressions of the new ones.

    Both shapes merge neighbouring digits of one common list of digits, the new one after a permutation.
    """
    digits = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(digits))))
    box: Box = {}
    at: dict[int, sympy.Expr] = {}
    for k, group in enumerate(draw(groups_of(list(order)))):
        axis, weight = axis_symbol(k), math.prod(digits[d] for d in group)
        box[axis] = sympy.Integer(weight)
        for d in group:
            weight //= digits[d]
            at[d] = Mod(FloorDiv(axis, weight), digits[d])
    exprs, extents = [], []
    for group in draw(groups_of(list(range(len(digits))))):
        total, extent = sympy.Integer(0), 1
        for d in reversed(group):
            total, extent = total + extent * at[d], extent * digits[d]
        exprs.append(total)
        extents.append(extent)
    if draw(st.booleans()):
        exprs = [simplify(expr, box) for expr in exprs]
    return exprs, extents, box


@st.composite
def groups_of(draw: st.DrawFn, items: list[int]) -> list[list[int]]:
    cuts = [0, *(k for k in range(1, len(items)) if draw(st.booleans())), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(cuts)]


def check_inverse(result: Inverse, exprs: list[sympy.Expr], extents: list[int], box: Box) -> None:
    names = [sympy.Symbol(f"v{k}", integer=True, nonnegative=True) for k in range(len(exprs))]
    for point in points(box):
        values = [value(expr, point) for expr in exprs]
        assert all(0 <= v < extent for v, extent in zip(values, extents, strict=True))
        solution = {axis: value(expr, dict(zip(names, values, strict=True))) for axis, expr in result.axes.items()}
        assert solution == {axis: point[axis] for axis in result.axes}
    assert {*result.axes, *result.free} == set(box)
    assert math.prod(int(box[axis]) for axis in result.axes) == math.prod(extents)


def solve(exprs: list[sympy.Expr], extents: list[int], box: Box) -> Inverse | None:
    names = [sympy.Symbol(f"v{k}", integer=True, nonnegative=True) for k in range(len(exprs))]
    return invert(exprs, names, [sympy.Integer(extent) for extent in extents], list(box), box)


@given(regroupings())
def test_invert_solves_every_regrouping(case: tuple[list[sympy.Expr], list[int], Box]) -> None:
    exprs, extents, box = case
    solution = solve(exprs, extents, box)
    assert solution is not None
    check_inverse(solution, exprs, extents, box)


@given(st.lists(expressions(), min_size=1, max_size=3), boxes(), st.data())
def test_invert_never_claims_too_much(built: list[Built], box: Box, data: st.DataObject) -> None:
    exprs = [b[0] for b in built]
    found_bounds = [bounds(expr, box) for expr in exprs]
    extents = [data.draw(st.sampled_from([int(b[1]) + 1, 1, 2, 4, 8])) for b in found_bounds]
    solution = solve(exprs, extents, box)
    if solution is not None:
        check_inverse(solution, exprs, extents, box)


def test_invert_knows_lengths_it_cannot_see() -> None:
    b, s, h, _ = AXES
    sizes = {b: sympy.Integer(4), s: LENGTH, h: LENGTH + 1}
    v = sympy.Symbol("v", integer=True, nonnegative=True)
    linear = sympy.expand((LENGTH + 1) * (LENGTH * b + s)) + h
    solution = invert([linear], [v], [4 * LENGTH * (LENGTH + 1)], [b, s, h], sizes)
    assert solution is not None
    assert set(solution.axes) == {b, s, h}
    for length in (1, 3):
        for point in points(sizes, length):
            at = {v: value(linear, point), LENGTH: length}
            assert {axis: value(expr, at) for axis, expr in solution.axes.items()} == {a: point[a] for a in sizes}


@pytest.mark.parametrize(
    ("exprs", "extents"),
    [
        ([AXES[0], AXES[0]], [2, 2]),
        ([2 * AXES[0]], [4]),
        ([AXES[0] + AXES[1]], [4]),
        ([AXES[0] * AXES[1]], [2]),
        ([AXES[0]], [3]),
        ([Mod(AXES[2], 2)], [2]),
    ],
)
def test_invert_refuses_maps_that_are_not_bijective(exprs: list[sympy.Expr], extents: list[int]) -> None:
    assert (
        solve(exprs, extents, {AXES[0]: sympy.Integer(2), AXES[1]: sympy.Integer(3), AXES[2]: sympy.Integer(4)}) is None
    )


@given(st.lists(expressions(), min_size=1, max_size=3), boxes(), st.sampled_from([2, 4, 6, 8, 12, 16, 24]))
def test_split_points_remove_every_division_of_the_axis(built: list[Built], box: Box, size: int) -> None:
    axis = AXES[0]
    box = {**box, axis: sympy.Integer(size)}
    exprs = [simplify(b[0], box) for b in built]
    result = split_points(exprs, axis, sympy.Integer(size))
    chain = [1, *result, size]
    assert all(a < b and b % a == 0 for a, b in itertools.pairwise(chain))
    if not result:
        return
    digits = [over_symbol(k) for k in range(len(chain) - 1)]
    sizes = {**box, **{d: sympy.Integer(b // a) for d, (a, b) in zip(digits, itertools.pairwise(chain), strict=True)}}
    whole = sympy.Add(*(a * d for a, d in zip(chain, digits, strict=False)))
    for expr in exprs:
        split = replace_axes(expr, {axis: whole}, sizes)
        assert isinstance(split, sympy.Expr)
        assert not any(atom.free_symbols & set(digits) for atom in split.atoms(FloorDiv, Mod))


def test_split_points_of_a_head_split() -> None:
    n = AXES[0]
    exprs = [FloorDiv(n, 1024), Mod(FloorDiv(n, 64), 16), Mod(n, 64)]
    assert split_points(exprs, n, sympy.Integer(3072)) == [64, 1024]
    assert split_points([FloorDiv(n, 5)], n, sympy.Integer(12)) == []
    assert split_points([FloorDiv(n + AXES[1], 4)], n, sympy.Integer(12)) == []


# Offsets --------------------------------------------------------------------------------------------------------------


@given(st.lists(expressions(), min_size=1, max_size=3), boxes(), st.lists(st.integers(0, 20), min_size=3, max_size=3))
def test_flatten_is_the_sum_of_strides(built: list[Built], box: Box, strides: list[int]) -> None:
    offset = flatten([b[0] for b in built], [sympy.Integer(s) for s in strides[: len(built)]], box)
    assert isinstance(offset, sympy.Expr)
    for point in some_points(box, 1):
        assert value(offset, point) == sum(b[1].at(point) * s for b, s in zip(built, strides, strict=False))


@given(expressions(), boxes(), st.sampled_from(AXES))
def test_coefficient_is_the_step_of_the_axis(built: Built, box: Box, axis: sympy.Symbol) -> None:
    step = coefficient(built[0], axis)
    if step is None:
        return
    for point in some_points(box, 1):
        ahead = {**point, axis: point[axis] + 1}
        assert built[1].at(ahead) - built[1].at(point) == value(step, point)


@given(st.lists(st.integers(2, 12), min_size=2, max_size=3), st.integers(1, 40), st.integers(2, 90), st.integers(1, 7))
def test_digits_of_a_part_are_put_together_again(sizes: list[int], count: int, length: int, stride: int) -> None:
    """The axes of an image, as digits of a position in one of `count` parts of all of them."""
    part, inner = axis_symbol(0), over_symbol(0)
    position = length * part + inner
    whole = [math.prod(sizes[k:]) for k in range(len(sizes) + 1)]
    digits = [
        FloorDiv(position, whole[0]),
        *(Mod(FloorDiv(position, n), m) for n, m in zip(whole[1:], sizes, strict=True)),
    ]
    box = {part: sympy.Integer(count), inner: sympy.Integer(length)}
    strides = [sympy.Integer(stride * size) for size in whole]
    assert flatten([simplify(digit, box) for digit in digits], strides, box) == sympy.expand(stride * position)
