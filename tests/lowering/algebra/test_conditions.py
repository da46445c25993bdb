"""Conditions: simplification preserves the meaning of random conditions, and of selects by them."""

from __future__ import annotations

import sympy
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fusion.lowering.algebra.conditions import conjuncts, negated, plain
from fusion.lowering.algebra.conditions import given as where_holds
from fusion.lowering.interpret.evaluate import Scope, evaluate
from fusion.lowering.ir.expr import Const, Expr, IndexValue, Load, Op, const, postorder
from fusion.lowering.ir.expr import make_op as op
from tests.lowering.building import I0

AXES = {I0: range(6)}
INTS = torch.tensor([0, 3, 1, 5, -2, 4])
FLOATS = torch.tensor([0.0, float("nan"), 1.5, -3.0, float("inf"), -0.0])
SCOPE = Scope({"flags": INTS % 2 == 0, "ints": INTS, "floats": FLOATS}, {}, {})

integers: st.SearchStrategy[Expr] = st.one_of(
    st.integers(-2, 6).map(lambda value: const(value, torch.int64)),
    st.sampled_from([IndexValue(I0), IndexValue(sympy.Integer(3)), Load("ints", (I0,), torch.int64)]),
    st.just(op("not", Load("ints", (I0,), torch.int64))),  # of bits
)
floats: st.SearchStrategy[Expr] = st.sampled_from([Load("floats", (I0,), torch.float32), const(1.0, torch.float32)])
compared = st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"])


def larger(parts: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.one_of(
        st.builds(op, st.sampled_from(["and", "or", "xor"]), parts, parts),
        st.builds(op, st.just("not"), parts),
        st.builds(op, st.just("where"), parts, parts, parts),
        parts.map(lambda mask: Load("flags", (I0,), torch.bool, mask)),
    )


smallest = st.one_of(
    st.booleans().map(lambda value: Const(value, torch.bool)),
    st.just(Load("flags", (I0,), torch.bool)),
    *(st.builds(op, compared, operands, operands) for operands in (integers, floats)),
)
conditions = st.recursive(smallest, larger, max_leaves=12)


def values(*roots: Expr) -> torch.Tensor:
    return torch.stack([result.expand(6) for result in evaluate(roots, AXES, SCOPE)])


@given(conditions)
def test_plain_and_negated_conditions_mean_the_same(condition: Expr) -> None:
    (actual,) = plain([condition])
    expected = values(condition)
    assert torch.equal(values(actual), expected)
    assert torch.equal(values(negated(condition)), ~expected)


@given(conditions)
def test_simplified_conditions_stay_unchanged(condition: Expr) -> None:
    (result,) = plain([condition])
    assert plain([result]) == [result]


def test_a_choice_within_a_choice_is_plain_in_one_step() -> None:
    flag, false = Load("flags", (I0,), torch.bool), Const(False, torch.bool)
    (result,) = plain([op("where", flag, op("where", flag, flag, flag), false)])
    assert plain([result]) == [result]


@given(conditions, integers, integers)
def test_choices_are_the_same(condition: Expr, a: Expr, b: Expr) -> None:
    chosen = op("where", condition, a, b)
    assert torch.equal(values(*plain([chosen])), values(chosen))


@given(conditions, conditions)
def test_under_a_condition_other_conditions_keep_their_meaning(condition: Expr, other: Expr) -> None:
    (condition,) = plain([condition])
    assume(not isinstance(condition, Const))
    holds = values(condition)
    (result,) = where_holds(condition, [op("where", condition, other, negated(other))])
    assert torch.equal(values(result)[holds], values(other)[holds])


def test_known_conditions_are_not_computed() -> None:
    flag, late = Load("flags", (I0,), torch.bool), op("lt", IndexValue(I0), const(4, torch.int64))
    both = op("and", flag, late)
    (result,) = where_holds(
        both, [op("where", op("or", op("not", flag), negated(late)), const(0.0, torch.float32), x())]
    )
    assert result is x()
    assert list(conjuncts(both)) == [both, flag, late]


def test_a_condition_of_floats_is_not_turned_around() -> None:
    less = op("lt", x(), const(1.0, torch.float32))
    assert negated(less) is op("not", less)
    assert not any(isinstance(node, Op) and node.name == "ge" for node in postorder(*plain([op("not", less)])))


def x() -> Expr:
    return Load("floats", (I0,), torch.float32)
