"""The online rule: its accumulators and values in form, and in meaning against folding one after the other.

Each body becomes two kernels, which the reference evaluator runs in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fusion.lowering.ir.expr import Cast, IndexValue, Load, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Loop
from fusion.lowering.printer import format_expr
from fusion.schedule.online import Online, online
from fusion.schedule.online.names import Renaming
from fusion.schedule.online.trial import NumericTrial
from tests.fusion.schedule.folds import BF16, COLUMNS, F16, F32, F64, Body, Folds, S, add, div, mul, sub, where
from tests.fusion.schedule.online_bodies import (
    added_mask,
    attention,
    attention_backward,
    centred_linear,
    chosen_factor,
    cosine,
    cubes,
    denominator,
    divergence,
    divergence_from_given,
    dropout,
    entropy,
    gated_by_relu,
    largest_power,
    log_softmax_products,
    log_sum_exp,
    log_sum_of_running,
    masked,
    masked_maximum,
    normalised_attention,
    powers_of_two,
    quantised,
    rms_linear,
    safe_attention,
    scaled_exponent,
    shifted_maximum,
    soft_minimum,
    softcap,
    temperature,
)
from tests.fusion.schedule.online_loops import chained, in_one_loop, inputs, loop_by_loop, run

# Bodies with an online form -------------------------------------------------------------------------------------------


SAFE = "exp(x[12*i0 + r0] - where(m == -inf, 0.0, m))"


MOVED = "where(m' == m, 1.0, exp(m' - m))"


# body → (operation, arguments, carry) of each accumulator of its last fold, and its value
FORMS: dict[Callable[[Body], Folds], tuple[list[tuple[str, str, str]], str]] = {
    denominator: ([("sum", SAFE, f"l' * {MOVED}")], "where(m == -inf, nan, l)"),
    attention: ([("dot", f"{SAFE}, v[4*r0 + i1]", f"o' * {MOVED}")], "where(m == -inf, nan, o)"),
    normalised_attention: (
        [("dot", f"{SAFE}, v[4*r0 + i1]", f"o' * {MOVED}")],
        "o / where(m == -inf, nan, l)",
    ),
    softcap: (
        [
            (
                "dot",
                "exp(tanh(x[12*i0 + r0] / 30.0) * 30.0 - where(m == -inf, 0.0, m)), v[4*r0 + i1]",
                f"o' * {MOVED}",
            )
        ],
        "o / l",
    ),
    scaled_exponent: (
        [
            (
                "sum",
                "exp((x[12*i0 + r0] - where(m == -inf, 0.0, m)) * 0.125)",
                "l' * where(m' == m, 1.0, exp((m' - m) * 0.125))",
            )
        ],
        "where(m == -inf, nan, l)",
    ),
    soft_minimum: (
        [("sum", "exp(where(n == inf, 0.0, n) - x[12*i0 + r0])", "l' * where(n' == n, 1.0, exp(n - n'))")],
        "where(n == inf, nan, l)",
    ),
    rms_linear: (
        [("dot", "x[12*i0 + r0] * w[r0], v[4*r0 + i1]", "")],
        "o * rsqrt(q / 12.0 + 1e-06)",
    ),
    gated_by_relu: ([("dot", "maximum(x[12*i0 + r0], 0.0), v[4*r0 + i1]", "")], "o / maximum(a, 1e-05)"),
    quantised: ([("dot", "x[12*i0 + r0], v[4*r0 + i1]", "")], "o / maximum(a / 127.0, 1e-05)"),
    chosen_factor: (
        [("dot", "where(y[12*i0 + r0] < 0.0, 1.0, x[12*i0 + r0]), v[4*r0 + i1]", "")],
        "o * rsqrt(q / 12.0 + 1e-06)",
    ),
    cosine: ([("sum", "x[12*i0 + r0] * y[12*i0 + r0]", "")], "o / sqrt(q) / sqrt(p)"),
    centred_linear: (
        [("dot", "x[12*i0 + r0], v[4*r0 + i1]", ""), ("sum", "v[4*r0 + i1]", "")],
        "o_0 - o_1 * (t / 12.0)",
    ),
    shifted_maximum: ([("max", "x[12*i0 + r0]", "")], "o - t / 12.0"),
    masked_maximum: (
        [("max", "where(index(r0) <= index(2*i0), x[12*i0 + r0], -inf)", "")],
        "(o - t / 12.0) * rsqrt(q / 12.0 + 1e-06)",
    ),
    attention_backward: (
        [
            ("dot", f"{SAFE} * g[12*i0 + r0], v[4*r0 + i1]", f"o_0' * {MOVED}"),
            ("dot", f"{SAFE}, v[4*r0 + i1]", f"o_1' * {MOVED}"),
        ],
        "%1 = where(m == -inf, nan, l)\n(o_0 - o_1 * (d / %1)) / %1",
    ),
}


ACCUMULATORS: dict[Callable[[Body], Folds], int] = {
    **{body: len(accumulators) for body, (accumulators, _) in FORMS.items()},
    # Where a sum is needed that another fold has, there is one less.
    **dict.fromkeys((dropout, masked, added_mask, temperature, powers_of_two, log_sum_exp), 1),
    **dict.fromkeys(
        (log_softmax_products, log_sum_of_running, safe_attention, cubes, largest_power, entropy, divergence), 1
    ),
    divergence_from_given: 2,
}


DIFFERENCES = (centred_linear, shifted_maximum, masked_maximum)
"""These reduce to the difference of a sum or maximum and a mean."""


# Form -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", FORMS, ids=lambda body: body.__name__)
def test_the_form_is_the_one_a_person_would_write(body: Callable[[Body], Folds]) -> None:
    _, _, result = chained(body(Body(F32)))
    accumulators, value = FORMS[body]
    got = [
        (fold.op, ", ".join(map(format_expr, fold.args)), format_expr(fold.carry) if fold.carry else "")
        for fold in result.folds
    ]
    assert (got, format_expr(result.value)) == (accumulators, value)


def test_entropy_shares_the_sum_and_keeps_its_shift() -> None:
    """x - m is small where x and m are not, so m stays; Σ exp(x - m) exists already."""
    _, _, result = chained(entropy(Body(F32)))
    (fold,) = result.folds
    assert format_expr(fold.args[0]).splitlines()[-1] == "exp(%1) * %1"
    assert fold.carry is not None
    assert "l' * where(m' == -inf, 0.0, where(m' == m, 0.0, m' - m))" in format_expr(fold.carry)
    assert "log(" in format_expr(result.value)
    assert "log(" not in format_expr(fold.args[0])


@pytest.mark.parametrize("body", FORMS, ids=lambda body: body.__name__)
def test_of_layers_that_differ_in_names_only_the_first_is_tried(
    body: Callable[[Body], Folds], monkeypatch: pytest.MonkeyPatch
) -> None:
    folds = body(Body(F32))
    names = Renaming.plain(folds)
    other = Renaming({name: f"{name}_9" for name in names.buffers}, {name: f"t9_{name}" for name in names.tiles})
    accumulators, value, _ = chained(folds)

    def again(*args: object) -> NumericTrial:
        raise AssertionError("it was tried again")

    monkeypatch.setattr("fusion.schedule.online.NumericTrial", again)
    result, total, _ = chained([other.fold(fold) for fold in folds])
    parts = {fold.name: f"t9_{fold.name}" for fold in accumulators}
    other = Renaming(other.buffers, {**other.tiles, **parts})
    assert result == tuple(other.fold(fold) for fold in accumulators)
    assert total is other.values([value])[0]


def test_factors_and_stand_ins_are_one_object() -> None:
    accumulators, _, _ = chained(attention(Body()))
    total, mixed = accumulators[1:]
    assert total.args[0] is mixed.args[0]
    assert total.carry is not None
    assert mixed.carry is not None
    assert total.carry.children()[1] is mixed.carry.children()[1]


def test_independent_folds_are_unchanged() -> None:
    b = Body()
    top, fold = b.top(), b.fold("t", "sum", b.x)
    assert online(fold, {"m": top}) == Online((fold,), fold.ref)


@pytest.mark.parametrize("narrow", [BF16, F16])
def test_a_rounding_stays_on_the_operand(narrow: torch.dtype) -> None:
    """1/l leaves the rounded operand, which is rounded as before."""
    b = Body(F32)
    top, total, power = b.softmax()
    value = Load("v", b.v.index, narrow)
    mixed = b.fold("o", "dot", Cast(div(power, total.ref), narrow, implicit=True), value)
    accumulators, result, _ = chained((top, total, mixed))
    assert isinstance(accumulators[2].args[0], Cast)
    assert accumulators[2].args[0].arg is accumulators[1].args[0]
    assert accumulators[2].dtype is F32
    assert format_expr(result) == "o / where(m == -inf, nan, l)"
    want = loop_by_loop(normalised_attention(Body()), inputs())
    got = in_one_loop((top, total, mixed), inputs(), F32, narrow)
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


def test_a_widened_operand_is_not_rounded_again() -> None:
    b = Body(F32)
    total, scale = b.squares()
    half = Load("h", (S,), F16)
    mixed = b.fold("o", "dot", Cast(mul(Cast(half, F32), scale), F16), Load("v", b.v.index, F16))
    result = online(mixed, {"q": total})
    assert isinstance(result, Online)
    assert result.folds[0].args[0] is half


def test_integers_that_divide_are_no_trouble() -> None:
    """Trials draw numbers for the loads; a divisor of 0 among them must not fail the trial."""
    b = Body(F32)
    number = Load("i", (S,), torch.int64)
    group = op("floordiv", number, sub(number, number))
    top, total, power = b.softmax(add(b.x, Cast(group, F32)))
    assert [fold.name for fold in chained((top, total))[0]] == ["m", "l"]
    assert power is total.args[0]


@pytest.mark.parametrize("kind", ["argmax", "sum", "max"])
def test_running_integers_are_positions(kind: str) -> None:
    """Trials draw them as integers, since they select positions."""
    b = Body(F32)
    given = (b.x, IndexValue(S)) if kind == "argmax" else (Load("i", (S,), torch.int64),)
    running = Fold("n", kind, given, (S,), torch.int64)
    one, two, three = (const(k, torch.int64) for k in (1, 2, 3))
    place = op("checked", op("remainder", running.ref, three), three, two, const(0, torch.int64))
    result = online(b.fold("l", "sum", where(op("eq", place, one), b.x, b.c(0))), {"n": running})
    assert isinstance(result, Online)
    assert [fold.args for fold in result.folds] == [(b.x,)]


# Meaning --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", ["", "rising", "low", "masked", "infinite", "nan"])
@pytest.mark.parametrize("body", ACCUMULATORS, ids=lambda body: body.__name__)
def test_one_loop_agrees_with_separate_loops(body: Callable[[Body], Folds], special: str) -> None:
    folds, given = body(Body()), inputs(special)
    want = loop_by_loop(folds, given)
    got = in_one_loop(folds, given)
    if not special:
        assert want.isfinite().all()
    size = max(1.0, float(want[want.isfinite()].abs().max())) if want.isfinite().any() else 1.0
    if body in DIFFERENCES:  # of infinite sums, where the sum of differences is NaN
        assert torch.equal(got.isfinite(), want.isfinite())
        got, want = got[want.isfinite()], want[want.isfinite()]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9 * size, equal_nan=True)


@pytest.mark.parametrize("operation", ["sum", "dot"])
@pytest.mark.parametrize("sign", ["factor", "divisor", "own"])
def test_a_sum_of_zeros_is_not_negative(operation: str, sign: str) -> None:
    """It starts at 0.0, to which each −0.0 is added, while the pending factor is negative."""
    b = Body()
    total = b.fold("t", "sum", b.x)
    value = {
        "factor": mul(total.ref, b.y),
        "divisor": div(b.y, total.ref),
        "own": op("neg", mul(b.y, op("abs", total.ref))),
    }[sign]
    folds = total, b.fold("o", operation, *((value, b.v) if operation == "dot" else (value,)))
    given = {**inputs(), "x": torch.full_like(inputs()["x"], -1.0), "y": torch.zeros_like(inputs()["y"])}
    given["v"] = given["v"].abs()
    for looped in (loop_by_loop, in_one_loop):
        got = looped(folds, given)
        assert not got.any() and not got.signbit().any()


@pytest.mark.parametrize("body", ACCUMULATORS, ids=lambda body: body.__name__)
def test_as_many_accumulators_as_the_rank(body: Callable[[Body], Folds]) -> None:
    assert len(chained(body(Body()))[2].folds) == ACCUMULATORS[body]


@pytest.mark.parametrize("special", ["", "rising", "low"])
@pytest.mark.parametrize("body", ACCUMULATORS, ids=lambda body: body.__name__)
def test_float32_is_as_exact_as_one_after_the_other(body: Callable[[Body], Folds], special: str) -> None:
    """The error is at most twice that of separate loops, and that of rounding the terms."""
    given = {name: tensor.float().double() for name, tensor in inputs(special).items()}
    folds = body(Body(F32))
    want = loop_by_loop(body(Body()), given)
    direct = run([Loop((S,), (fold,)) for fold in folds], folds[-1].ref, given, F32, F32).double()
    got = in_one_loop(folds, given, F32, F32).double()
    finite = want.isfinite() & direct.isfinite()
    assert finite.any()
    size = float(want[finite].abs().max())
    if body is attention_backward:  # g - Σ p·g is rounded as g is
        size = max(size, float(given["g"].abs().max() * given["v"].abs().max()))
    if body is centred_linear:  # x - mean is as exact as x in one form, its product with v in the other
        size = max(size, float(given["x"].abs().max() * given["v"].abs().sum(0).max()))
    allowed = 2 * float((direct - want)[finite].abs().max()) + 1e-6 * size
    assert float((got - want)[finite].abs().max()) <= allowed


def test_a_fully_masked_row_is_nan_and_zero_where_that_is_asked_for() -> None:
    for body, expected in ((attention, float("nan")), (normalised_attention, float("nan")), (safe_attention, 0.0)):
        got = in_one_loop(body(Body()), inputs("masked"))
        torch.testing.assert_close(got[0], torch.full((COLUMNS,), expected, dtype=F64), equal_nan=True)
        assert got[4].isfinite().all()


# Refusals -------------------------------------------------------------------------------------------------------------


def test_a_running_value_is_not_the_final_one() -> None:
    """This is why folds carry: otherwise a sum would keep terms with older running values."""
    *earlier, last = denominator(Body())
    given = inputs("rising")
    with_running = replace(last, carry=last.before)
    got = run((Loop((S,), (*earlier, with_running)),), last.ref, given, F64, F64)
    want = loop_by_loop((*earlier, last), given)
    assert (got > 1.5 * want).any()
