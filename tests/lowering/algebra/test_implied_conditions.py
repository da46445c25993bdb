"""Choices that others decide: random nests keep their values, and every mask its loads inside their tensor."""

from __future__ import annotations

import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.lowering.algebra.implied_conditions import is_implied, simplify_implied
from fusion.lowering.interpret.evaluate import Scope, evaluate
from fusion.lowering.ir.expr import Expr, IndexValue, Load, Op, const, guarded, loads, postorder
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.scalar_ops import CHECKED
from tests.lowering.building import I0, I1

SIZES = {I0: sympy.Integer(6), I1: sympy.Integer(4)}
POINTS = {I0: range(6), I1: range(4)}
SCOPE = Scope({"x": torch.arange(1.0, 13.0), "y": torch.arange(-40.0, -28.0)}, {}, {})

compared = st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"])
places = st.sampled_from([IndexValue(I0), IndexValue(I1), IndexValue(I0 - 2), IndexValue(I0 + I1), IndexValue(-I1)])
numbers = st.integers(-3, 8).map(lambda value: const(value, torch.int64))
comparisons = st.builds(op, compared, places, numbers)
conditions = st.recursive(
    comparisons,
    lambda parts: st.one_of(
        st.builds(op, st.sampled_from(["and", "or"]), parts, parts), st.builds(op, st.just("not"), parts)
    ),
    max_leaves=4,
)


@st.composite
def element(draw: st.DrawFn) -> Expr:
    """An element of 12, masked where it would be outside."""
    index = draw(st.sampled_from([I0, I1 + 2, 2 * I0 - 3, I0 + I1 + 5]))
    inside = op(
        "and",
        op("ge", IndexValue(index), const(0, torch.int64)),
        op("lt", IndexValue(index), const(12, torch.int64)),
    )
    return Load(draw(st.sampled_from("xy")), (index,), torch.float32, op("and", inside, draw(conditions)))


def larger(parts: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.one_of(
        st.builds(op, st.just("where"), conditions, parts, parts),
        st.builds(guarded, parts, conditions),
        st.builds(op, st.just("add"), parts, parts),
    )


nests = st.recursive(element(), larger, max_leaves=8)


def values(*roots: Expr) -> torch.Tensor:
    return torch.stack([result.expand(6, 4) for result in evaluate(roots, POINTS, SCOPE)])


@given(nests, nests)
def test_random_nests_keep_their_values(first: Expr, second: Expr) -> None:
    """The evaluation refuses loads outside of their tensor, also in arms that are not chosen."""
    roots = [first, second]
    result = simplify_implied(roots, SIZES)
    assert torch.equal(values(*result), values(*roots))
    assert len(postorder(*result)) <= len(postorder(*roots)) + 40


@given(conditions, st.lists(conditions, max_size=2))
def test_a_condition_that_holds_under_others(condition: Expr, others: list[Expr]) -> None:
    everywhere = values(condition, *others).bool()
    if is_implied(condition, others, SIZES):
        assert everywhere[0][everywhere[1:].all(0)].all()


def test_an_arm_that_checks_an_index_stays() -> None:
    """Eager checks all of them, whatever is chosen afterwards."""
    less = [op("lt", IndexValue(I0), const(n, torch.int64)) for n in (2, 4)]
    index = Op(CHECKED, (IndexValue(I0 + 9), const(0, torch.int64), const(12, torch.int64)), torch.int64)
    a, c = Load("x", (I0,), torch.float32), Load("y", (I0,), torch.float32)
    inner = op("where", less[1], a, Load("x", (index,), torch.float32))
    assert simplify_implied([op("where", less[0], inner, c)], SIZES)[0].args[1] is inner


def test_an_index_that_is_safe_where_it_is_not_chosen_stays_so() -> None:
    chosen = op("ge", IndexValue(I0), const(1, torch.int64))
    place = op("where", chosen, Load("y", (I0,), torch.int64), const(0, torch.int64))
    index = Op(CHECKED, (place, const(0, torch.int64), const(12, torch.int64)), torch.int64)
    root = op("where", chosen, Load("x", (index,), torch.float32), const(0.0, torch.float32))
    assert simplify_implied([root], SIZES)[0] is root


def test_masks_do_without_conditions_that_others_imply() -> None:
    low, lower = (op("lt", IndexValue(I0), const(n, torch.int64)) for n in (5, 3))
    load = Load("x", (I0,), torch.float32, op("and", lower, low))
    (root,) = simplify_implied([op("where", low, load, const(0.0, torch.float32))], SIZES)
    (kept,) = loads(root)
    assert kept.mask is lower


def test_nests_that_are_too_large_stay() -> None:
    nest: Expr = Load("x", (I0,), torch.float32)
    for n in range(200):
        nest = op("where", op("lt", Load("y", (I0,), torch.float32), const(float(n), torch.float32)), nest, nest)
        nest = op("add", nest, const(1.0, torch.float32))
    assert simplify_implied([nest], SIZES)[0] is nest


def test_an_element_that_is_read_anyway_is_read_once() -> None:
    """As the position at which an image is sampled, which tells whether there is a pixel."""
    place = Load("x", (I0,), torch.float32)
    inside = op("lt", place, const(4.0, torch.float32))
    sample = op("add", Load("x", (I0,), torch.float32, inside), const(1.0, torch.float32))
    (root,) = simplify_implied([op("where", inside, sample, const(0.0, torch.float32))], SIZES)
    assert [*loads(root)] == [place]
    alone = Load("x", (I0,), torch.float32, op("lt", Load("y", (I0,), torch.float32), const(4.0, torch.float32)))
    (root,) = simplify_implied([op("where", alone.mask, op("neg", alone), const(0.0, torch.float32))], SIZES)
    assert alone in [*loads(root)]
