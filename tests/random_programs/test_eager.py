"""Which differences from eager the judge of random programs takes for roundings, and which for wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.random_programs.eager import Eager
from tests.random_programs.faulty import judged_with, wrong
from tests.random_programs.inputs import Input
from tests.random_programs.judge import judge
from tests.random_programs.means import Means
from tests.random_programs.program import Program
from tests.random_programs.roundings import Roundings
from tests.random_programs.runs import Call


def test_an_exact_sum_of_eager_is_taken_for_luck() -> None:
    """The gradient is a float32 sum of three incoming ones, which is exact in eager's order."""
    program = Program(
        inputs=(Input("x0", (), torch.float64, grad=True), Input("x1", (), torch.float32)),
        source="""
            t0 = torch.lerp(x1, x0.to(x1.dtype), 0.25)
            return (t0.repeat(3),)
        """,
        calls=({},),
        backward=True,
    )
    assert judge(program).status == "pass"


def test_a_float64_run_exists_if_the_operand_of_a_cast_is_written_later() -> None:
    """In float64 the cast would be its operand itself, which autograd refuses to have changed."""
    program = Program(
        inputs=(Input("x0", (3,), torch.float32, grad=True), Input("x1", (3,), torch.float16)),
        source="""
            t0 = x0 * x1.to(x0.dtype)
            x1.exp_()
            return (t0,)
        """,
        calls=({},),
        backward=True,
    )
    assert Eager(Call(program, 0)).exact() is not None


def test_a_norm_of_equal_numbers_is_as_far_off_as_its_mean() -> None:
    """Eager's mean of them is exact; if they differ by a rounding, the differences from it are not zero."""
    program = Program(
        inputs=(Input("x0", ("A",), torch.float32, layout="expanded"),),
        source="""
            return (F.layer_norm(x0, x0.shape[-1:]),)
        """,
        calls=({"A": 1500},),
        seed=593,
    )
    assert judge(program).status == "pass"


@pytest.mark.parametrize(("rounding", "status"), [(2.0**-24, "pass"), (0.0, "mismatch")])
def test_a_norm_times_an_infinity_may_be_nan_or_infinite(
    monkeypatch: pytest.MonkeyPatch, rounding: float, status: str
) -> None:
    """Eager has NaN for the number that is its row's mean; for any number but 0 it is an infinity."""
    program = Program(
        inputs=(Input("x0", (3,), torch.float32),),
        source="""
            t0 = torch.arange(0, 3, device=x0.device) + x0.round().clamp(1, 1)
            return (F.layer_norm(t0, (3,)) * (x0.exp() * -torch.inf),)
        """,
        calls=({},),
    )

    def fused(function, **settings):  # type: ignore[no-untyped-def]
        def run(x0: torch.Tensor) -> tuple[torch.Tensor]:
            with Means(rounding):
                (result,) = function(x0)
            return (result if rounding else result.nan_to_num(nan=7.0),)

        return run

    assert judged_with(monkeypatch, fused, program).status == status


GATHERED = Program(
    inputs=(Input("x0", ("A",), torch.float32), Input("x1", ("B",), torch.int64)),
    source="""
        t0 = (x0[:1] * torch.tensor([-7, -6, -8], device=x0.device))[..., x1.long() % 3 // 3]
        return (F.layer_norm(t0, t0.shape[-1:]),)
    """,
    calls=({"A": 3, "B": 7},),
    seed=3,
)
"""The norm of gathered numbers, all of them equal: 0 in eager."""


@pytest.mark.parametrize(("rounding", "status"), [(2.0**-24, "pass"), (2.0**-18, "mismatch")])
def test_a_norm_of_equal_numbers_is_0_or_the_rounding_of_its_mean(
    monkeypatch: pytest.MonkeyPatch, rounding: float, status: str
) -> None:
    def fused(function, **settings):  # type: ignore[no-untyped-def]
        def off(x0: torch.Tensor, x1: torch.Tensor) -> tuple[torch.Tensor]:
            norm = function(x0, x1)[0]
            assert not norm.any()
            return (norm + 7 * abs(x0[0]) * rounding / 1e-5**0.5,)

        return off

    assert judged_with(monkeypatch, fused, GATHERED).status == status


CONVERTED = Program(
    inputs=(Input("x0", (2,), torch.float32),),
    source="""
        return ((x0 * 4).softmax(-1).to(torch.bfloat16).cumsum(-1).to(torch.float32),)
    """,
    calls=({},),
    seed=17,
)
"""Two numbers whose sum is 1.  Eager rounds the sum of the converted ones to bfloat16: 1 again."""


def test_a_conversion_need_not_be_rounded_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CONVERTED.function()(*CONVERTED.tensors(0))[0][1] == 1
    converted = CONVERTED.function(wide=True, rounded=True)(*CONVERTED.tensors(0, wide=True))[0]
    assert converted.dtype is torch.float64 and converted[1] > 1 + 2.0**-10
    assert judged_with(monkeypatch, wrong(0, lambda t: converted.float()), CONVERTED).status == "pass"
    assert judged_with(monkeypatch, wrong(0, lambda t: t + 2.0**-6), CONVERTED).status == "mismatch"


def test_a_sum_of_converted_numbers_is_right() -> None:
    assert judge(CONVERTED).status == "pass"


def test_a_conversion_to_the_dtype_that_is_there_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns the tensor itself, so a write to it is not a write to a rounded copy."""
    program = Program(
        inputs=(Input("x0", ("A",), torch.bfloat16),),
        source="""
            x0.to(torch.bfloat16).add_(1)
            return (x0 * 2,)
        """,
        calls=({"A": 5},),
    )
    verdict = judged_with(monkeypatch, wrong(0, lambda t: t + 1), program)
    assert verdict.status == "mismatch" and "result 0" in verdict.reason


def test_equal_rows_are_rounded_alike() -> None:
    """The differences of each row are the same rounding of its mean, which the sum over the rows accumulates."""
    program = Program(
        inputs=(Input("x0", ("A", "B"), torch.float32, layout="expanded", values="positive"),),
        source="""
            return (F.layer_norm(x0, x0.shape[-1:]).sum(),)
        """,
        calls=({"A": 400, "B": 5},),
        seed=31,
    )
    assert judge(program).status == "pass"


SORTED = Program(
    inputs=(Input("x0", ("A",), torch.float16),),
    source="""
        return ((x0 + 2 + 1).argsort(stable=True),)
    """,
    calls=({"A": 515},),
)


def test_places_of_numbers_that_were_rounded_otherwise_on_the_way_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eager rounds x + 2 to 16 bits, which creates ties; x itself is rounded by less."""
    assert judge(SORTED).status == "pass"
    verdict = judged_with(monkeypatch, wrong(0, lambda t: t.roll(40)), SORTED)
    assert verdict.status == "mismatch"


def test_only_computed_results_are_off_by_a_rounding() -> None:
    x = torch.tensor([1.0, 3.0, 1.0, -2.0, math.inf], dtype=torch.float64)
    with Roundings(0.01, 0.0):
        moved = torch.cat([x.flip(0).clone(), x.abs(), x.sort()[0], torch.where(x > 1, x, -x)])
        off = x + 2
    assert torch.isin(moved.abs(), x.abs()).all()
    assert off[0] == off[2] and not torch.equal(off, x + 2)
    torch.testing.assert_close(off, x + 2, rtol=0.01, atol=0)


INFINITE = Program(
    inputs=(
        Input("x0", ("A", 9), torch.float32, grad=True),
        Input("x1", (9,), torch.float32, values="special", grad=True),
    ),
    source="""
        return (F.layer_norm(x0, x0.shape[-1:], x1),)
    """,
    calls=({"A": 4},),
    backward=True,
    seed=118,
)


def test_which_infinities_become_nan_is_as_in_a_kernel_or_in_its_decomposition() -> None:
    """Eager's kernel for the CPU adds infinite multiples of the input and of the mean; no other form does."""
    assert not torch.isfinite(INFINITE.tensors(0)[1]).all()
    assert judge(INFINITE).status == "pass"


ROUNDED_TO_A_SIGN = Program(
    inputs=(Input("x0", ("A",), torch.bfloat16, values="positive"),),
    source="""
        return ((x0.exp().log() - x0) * torch.inf + torch.inf,)
    """,
    calls=({"A": 64},),
)


def test_an_infinity_or_nan_may_depend_on_the_sign_of_a_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager rounds the exponential to 16 bits: the difference has another sign, or is 0.  It has -inf nowhere."""
    assert judge(ROUNDED_TO_A_SIGN).status == "pass"
    for change in (lambda t: t.nan_to_num(7.0), torch.neg):
        verdict = judged_with(monkeypatch, wrong(0, change), ROUNDED_TO_A_SIGN)
        assert verdict.status == "mismatch"


PRODUCT_PAST_THE_RANGE = Program(
    inputs=(Input("x0", (1, "A"), torch.float32, values="positive"),),
    source="""
        t0 = torch.arange(x0.shape[1], device=x0.device)
        return (torch.where(t0 < 256, x0.clamp(2.5, 3), 0).prod(1),)
    """,
    calls=({"A": 4096},),
)


def test_a_product_with_0_may_be_nan_if_a_partial_product_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager accumulates several products in parallel; in one, 256 numbers are infinite before a 0 comes."""
    (numbers,) = PRODUCT_PAST_THE_RANGE.tensors(0)
    factors = torch.where(torch.arange(4096) < 256, numbers.clamp(2.5, 3), 0)
    assert factors.prod(1) == factors.double().prod(1) == 0
    assert factors.double().cumprod(1).max() > torch.finfo(torch.float32).max
    assert judged_with(monkeypatch, wrong(0, lambda t: t * torch.nan), PRODUCT_PAST_THE_RANGE).status == "pass"
    for change in (lambda t: t + torch.inf, lambda t: t + 7):
        assert judged_with(monkeypatch, wrong(0, change), PRODUCT_PAST_THE_RANGE).status == "mismatch"


def test_a_product_within_the_range_is_not_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    program = replace(PRODUCT_PAST_THE_RANGE, source=PRODUCT_PAST_THE_RANGE.source.replace("256", "64"))
    assert judge(program).status == "pass"
    assert judged_with(monkeypatch, wrong(0, lambda t: t * torch.nan), program).status == "mismatch"


def test_a_mean_of_an_infinity_is_nan_from_the_next_number_on() -> None:
    """Eager's rows end with it."""
    program = Program(
        inputs=(Input("x0", ("A", 5), torch.float32),),
        source="""
            t0 = torch.cat((x0, torch.full_like(x0, torch.inf)[:, :1]), 1)
            return (torch.var_mean(t0, 1)[1], torch.std_mean(t0.flip(1), 1)[1],)
        """,
        calls=({"A": 4},),
    )
    first, second = program.function()(*program.tensors(0))
    assert first.isinf().all() and second.isnan().all()
    assert judge(program).status == "pass"


def test_intermediate_overflow_of_eager_is_not_compared() -> None:
    """1 / 1e-12 is beyond float16; times 0 it is 0, or NaN if it was rounded."""
    source = """
        t0 = x0.cumsum(0) * (x1.expand_as(x0).cumsum(1) % 5)
        return (F.binary_cross_entropy(t0.sigmoid(), x2.to(t0.dtype), reduction='none'),)
    """
    inputs = (
        Input("x0", ("B", "C"), torch.float16, grad=True),
        Input("x1", (1, "C"), torch.bool),
        Input("x2", ("B", "C"), torch.bool),
    )
    program = Program(inputs, source, ({"B": 32, "C": 5},), backward=True)
    verdict = judge(program)
    assert verdict.status == "pass" and verdict.unsteady, verdict.reason


@pytest.mark.parametrize("kind", [math.nan, math.inf, 0.0])
def test_the_judge_detects_a_misplaced_nan(monkeypatch: pytest.MonkeyPatch, kind: float) -> None:
    def fused(function, **settings):  # type: ignore[no-untyped-def]
        return lambda x0, x1: (function(x0, x1)[0].index_fill(0, torch.tensor([1]), kind),)

    verdict = judged_with(monkeypatch, fused, replace(INFINITE, backward=False))
    assert verdict.status == "mismatch" and "result 0" in verdict.reason
