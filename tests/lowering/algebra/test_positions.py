"""Positions: simplification keeps the value of random integers of indices, and decides comparisons by bounds."""

from __future__ import annotations

import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.lowering.algebra.positions import is_free, simplify_all
from fusion.lowering.indexing import FloorDiv
from fusion.lowering.interpret import run_program
from fusion.lowering.interpret.evaluate import Scope, evaluate
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Load, Op, const, loads, postorder
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.program import Map
from fusion.schedule.rewrites.inline import inline_cheap_maps
from tests.lowering.building import I0, I1
from tests.lowering.lowered import check, lowered

SIZES = {I0: sympy.Integer(5), I1: sympy.Integer(3)}
POINTS = {I0: range(5), I1: range(3)}
SCOPE = Scope({"x": torch.tensor([3, -7, 0, 9, 2])}, {}, {})
S = sympy.Symbol("s0", integer=True, positive=True)

places = st.sampled_from([IndexValue(I0), IndexValue(I1), IndexValue(I0 + 1), IndexValue(2 * I0 - I1)])
numbers = st.integers(-3, 5).map(lambda value: const(value, torch.int64))
compared = st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"])


def larger(parts: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    conditions = st.builds(op, compared, parts, parts)
    return st.one_of(
        st.builds(op, st.sampled_from(["add", "sub", "mul", "maximum", "minimum"]), parts, parts),
        st.builds(op, st.sampled_from(["neg", "abs"]), parts),
        st.builds(op, st.just("where"), conditions, parts, parts),
    )


integers = st.recursive(st.one_of(places, numbers, st.just(Load("x", (I0,), torch.int64))), larger, max_leaves=6)


def values(*roots: Expr) -> torch.Tensor:
    return torch.stack([result.expand(5, 3) for result in evaluate(roots, POINTS, SCOPE)])


@given(integers, integers, compared)
def test_simplified_numbers_and_comparisons_keep_their_meaning(first: Expr, second: Expr, name: str) -> None:
    roots = [first, op("where", op(name, first, second), first, second)]
    assert torch.equal(values(*simplify_all(roots, SIZES)), values(*roots))
    compared = op(name, first, second)
    assert torch.equal(values(*simplify_all([compared], SIZES)), values(compared))


def decided(condition: Expr, sizes: dict[sympy.Symbol, sympy.Expr] = SIZES) -> bool | None:
    (result,) = simplify_all([condition], sizes)
    return bool(result.value) if isinstance(result, Const) else None


@given(
    st.sampled_from([torch.float32, torch.float64]),
    st.lists(st.tuples(st.sampled_from(["add", "sub", "mul"]), st.sampled_from([0.0, 0.5, -0.5, 2.0, 0.25, 3.0, 0.3]))),
)
def test_floats_that_are_truncated_keep_their_value(dtype: torch.dtype, steps: list[tuple[str, float]]) -> None:
    number: Expr = Cast(IndexValue(I0), dtype)
    for name, value in steps:
        number = Op(name, (number, const(value, dtype)), dtype)
    integer = Cast(number, torch.int64)
    (simplified,) = simplify_all([integer], SIZES)
    torch.testing.assert_close(values(simplified), values(integer))


def test_halves_of_indices_are_indices_where_they_are_exact() -> None:
    half = Cast(Op("mul", (Cast(IndexValue(I0), torch.float32), const(0.5, torch.float32)), torch.float32), torch.int64)
    third = Cast(
        Op("mul", (Cast(IndexValue(I0), torch.float32), const(1 / 3, torch.float32)), torch.float32), torch.int64
    )
    below = Cast(
        Op("sub", (Cast(IndexValue(I0), torch.float32), const(0.5, torch.float32)), torch.float32), torch.int64
    )
    assert simplify_all([half], SIZES) == [IndexValue(FloorDiv(I0, 2))]
    assert simplify_all([half], {I0: sympy.Integer((1 << 24) + 2)}) == [half]  # the last ones are rounded
    assert simplify_all([third, below], SIZES) == [third, below]  # rounded; truncated towards 0


def test_nearest_neighbours_are_read_at_indices() -> None:
    def up(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.nn.functional.interpolate(x.sin(), scale_factor=2.0), y], 1)

    given = torch.randn(2, 3, 4, 5), torch.randn(2, 1, 8, 10)
    program = inline_cheap_maps(lowered(up, *given))
    cat = program.nodes[-1]
    assert isinstance(cat, Map)
    assert all(not isinstance(index, Expr) for load in loads(*cat.exprs) for index in load.index)
    torch.testing.assert_close(run_program(program, given)[0], up(*given))


def test_bounds_decide_each_comparison() -> None:
    i, four, five = IndexValue(I0), const(4, torch.int64), const(5, torch.int64)
    results = {name: (decided(op(name, i, four)), decided(op(name, i, five))) for name in ("lt", "le", "gt", "ge")}
    assert results == {"lt": (None, True), "le": (True, True), "gt": (False, False), "ge": (None, False)}
    assert decided(op("eq", i, five)) is False and decided(op("ne", i, five)) is True
    assert decided(op("eq", i, four)) is None and decided(op("ne", i, four)) is None


def test_bounds_decide_absolute_values_and_extremes() -> None:
    away, near, zero = IndexValue(I0 + 1), IndexValue(I1 - 2), const(0, torch.int64)
    cases = [op("abs", away), op("abs", near), op("maximum", near, zero), op("minimum", zero, near)]
    assert simplify_all(cases, SIZES) == [away, IndexValue(2 - I1), zero, near]
    (undecided,) = simplify_all([op("abs", IndexValue(I0 - 1))], SIZES)
    assert isinstance(undecided, Op)


def test_choices_are_looked_at_under_their_conditions() -> None:
    """The element before each: that of the first is one less, so that all differ by one."""
    i, one = IndexValue(I0), const(1, torch.int64)
    before = op("where", op("lt", i, one), op("sub", i, one), IndexValue(I0 - 1))
    assert decided(op("eq", op("sub", i, before), one)) is True
    assert decided(op("eq", op("sub", i, before), one), {I0: S}) is True
    wrong = op("where", op("lt", i, one), i, IndexValue(I0 - 1))
    assert decided(op("eq", op("sub", i, wrong), one)) is None


def test_loaded_numbers_and_sizes_decide_nothing() -> None:
    loaded = Load("x", (I0,), torch.int64)
    assert decided(op("lt", loaded, const(100, torch.int64))) is None
    assert decided(op("lt", IndexValue(I0), IndexValue(S)), {I0: sympy.Integer(5)}) is None


def test_checks_of_positions_that_are_inside_go() -> None:
    def check_of(index: Expr, size: int) -> Expr:
        return op("checked", index, *(const(n, torch.int64) for n in (size, size - 1, 0)))

    i = IndexValue(I0)
    assert simplify_all([check_of(i, 5)], SIZES) == [i]
    assert simplify_all([check_of(i, 4)], SIZES) == [check_of(i, 4)]
    back = op("sub", i, const(1, torch.int64))
    assert simplify_all([check_of(back, 5)], SIZES) == [check_of(IndexValue(I0 - 1), 5)]
    (load,) = simplify_all([Load("x", (check_of(i, 5),), torch.int64)], SIZES)
    assert load == Load("x", (I0,), torch.int64)


def test_free_expressions_have_no_loads_and_no_checks() -> None:
    i = IndexValue(I0)
    assert is_free(i) and is_free(op("le", i, IndexValue(I1))) and is_free(const(True, torch.bool))
    assert not is_free(Load("x", (I0,), torch.int64))
    assert not is_free(op("checked", i, i, i, const(0, torch.int64)))
    assert not is_free(const(1.0, torch.float32))
    many: Expr = op("le", i, IndexValue(I1))
    for k in range(9):
        many = Op("xor", (many, op("le", i, const(k, torch.int64))), torch.bool)
    assert not is_free(many)


def mask_of_one_document(x: torch.Tensor) -> torch.Tensor:
    """Mask later tokens, and tokens of other documents: a document continues while positions count up by one."""
    places = (torch.arange(x.shape[1]) + 0).expand(x.shape[0], -1)
    steps = torch.diff(places, prepend=places[:, :1] - 1, dim=-1)
    documents = (steps != 1).cumsum(-1)
    rows, columns = places[0][None, :, None], places[0][None, None, :]
    batch = torch.arange(x.shape[0])[:, None, None]
    same = documents[batch, rows] == documents[batch, columns]
    return x.masked_fill(~(same & (columns <= rows)), -1.0)


def test_a_mask_computed_from_positions_is_a_mask_of_indices() -> None:
    x = torch.rand(2, 6, 6)
    check(mask_of_one_document, x)
    (node,) = lowered(mask_of_one_document, x).nodes
    assert isinstance(node, Map)
    (symbolic,) = lowered(mask_of_one_document, x, mode="symbolic").nodes
    assert isinstance(symbolic, Map)


def test_positions_that_are_asked_for_are_stored() -> None:
    check(
        lambda x: (torch.arange(5) + 2, torch.arange(5)[:, None] <= torch.arange(4), x + torch.arange(5)), torch.rand(5)
    )
    check(lambda x: x[(torch.arange(4) - 2)], torch.rand(5))
    check(lambda x: torch.zeros(3, dtype=torch.int64).cumsum(0) + torch.zeros(3).cumsum(0) + x, torch.rand(3))


@given(integers, st.integers(-3, 6), st.integers(-3, 6), st.integers(1, 8))
def test_checks_of_clamped_positions_disappear_where_they_cannot_fail(
    place: Expr, low: int, high: int, size: int
) -> None:
    """The last clamp counts, as in `clamp(low, high)` with a low that is above."""
    least, greatest, zero, one = (const(number, torch.int64) for number in (low, high, 0, 1))
    limited = op("minimum", greatest, op("maximum", least, op("mul", place, place)))
    check = op("checked", limited, zero, const(size - 1, torch.int64), one)
    (left,) = simplify_all([check], SIZES)
    (value,) = values(limited)
    if any(isinstance(node, Op) and node.name == "checked" for node in postorder(left)):
        assert not (min(low, high) >= 0 and high < size)
    else:
        assert value.min() >= 0 and value.max() < size
        assert torch.equal(values(left)[0], value)


def test_a_clamped_remainder_is_the_position_itself() -> None:
    inner = op("minimum", const(7, torch.int64), op("maximum", const(0, torch.int64), Load("x", (I0,), torch.int64)))
    assert simplify_all([op("remainder", inner, const(8, torch.int64))], SIZES) == [inner]
    (kept,) = simplify_all([op("remainder", inner, const(7, torch.int64))], SIZES)
    assert isinstance(kept, Op) and kept.name == "remainder"
