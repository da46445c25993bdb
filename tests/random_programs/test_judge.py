"""The judge of random programs: which results it calls wrong, and where it puts the blame."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion.lowering.errors import Unsupported
from tests.random_programs import judge as judging
from tests.random_programs.faulty import PLAIN, judged_with, wrong
from tests.random_programs.inputs import Input
from tests.random_programs.program import Program
from tests.random_programs.runs import Call, Run


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        (0, lambda t: t * 1.0001, "result 0 of torch.float32"),
        (0, lambda t: t.double(), "result 0 is torch.float64"),
        (0, lambda t: t[:3], "result 0 is"),
        (0, lambda t: t.t().contiguous().t(), "strides"),
        (0, lambda t: t / (t == t[1, 1]).logical_not(), "result 0 of torch.float32"),
        (1, lambda t: t.t().clone().t(), "shares memory"),
        (2, lambda t: t + (t == t[1, 1]), "result 2 of torch.int64"),
    ],
)
def test_the_judge_detects_wrong_results(monkeypatch: pytest.MonkeyPatch, part: int, change, reason: str) -> None:  # type: ignore[no-untyped-def]
    verdict = judged_with(monkeypatch, wrong(part, change))
    assert verdict.status == "mismatch" and reason in verdict.reason


def test_the_judge_detects_a_missing_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(function, **settings):  # type: ignore[no-untyped-def]
        return lambda x0, x1: function(x0, x1.clone())

    assert "input 1" in judged_with(monkeypatch, fused).reason


def test_the_judge_accepts_right_results(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged_with(monkeypatch, wrong(0, lambda t: t * (1 + 1e-7))).status == "pass"


def test_a_lost_device_is_ours_before_eager_runs_and_eagers_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("misaligned address")

    right = wrong(0, lambda t: t)
    monkeypatch.setattr(judging, "is_lost", lambda device: True)
    with monkeypatch.context() as patch:
        patch.setattr(judging, "compare", fails)
        verdict = judged_with(monkeypatch, right)
    assert verdict.status == "skipped" and "eager takes the device down" in verdict.reason
    monkeypatch.setattr(judging, "synchronize", fails)
    assert judged_with(monkeypatch, right).status == "error"


@pytest.mark.parametrize("through_the_compiler", [True, False])
def test_a_call_that_eager_refuses_is_not_held_against_the_compiler(
    monkeypatch: pytest.MonkeyPatch, through_the_compiler: bool
) -> None:
    """The second one: eager adds the mask to the scores in place, of a single batch here, where there are two masks."""
    program = Program(
        inputs=(Input("x0", ("A", 4, 1), torch.float64), Input("x1", ("B", 4, 4), torch.bool)),
        source="return (F.scaled_dot_product_attention(x0, x0, x0, attn_mask=x1),)",
        calls=({"A": 2, "B": 2}, {"A": 1, "B": 2}),
    )

    def fused(function, **settings):  # type: ignore[no-untyped-def]
        return lambda x0, x1: (x1[:, :, :1] * x0,) if len(x0) == 1 and through_the_compiler else function(x0, x1)

    verdict = judged_with(monkeypatch, fused, program)
    assert verdict.status == "skipped" and "call 1" in verdict.reason
    assert "doesn't match the broadcast shape" in verdict.reason


@pytest.mark.parametrize(("change", "status"), [(lambda t: t, "skipped"), (lambda t: t + 1, "mismatch")])
def test_the_fallback_of_a_refused_call_is_judged(monkeypatch: pytest.MonkeyPatch, change, status: str) -> None:  # type: ignore[no-untyped-def]
    right = wrong(0, change)

    def fused(function, **settings):  # type: ignore[no-untyped-def]
        def refuses(*arguments: object) -> None:
            raise Unsupported("the inputs overlap otherwise")

        return refuses if settings["options"]["strict"] else right(function)

    verdict = judged_with(monkeypatch, fused)
    assert verdict.status == status


def test_nothing_is_compared_before_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's capture, with which a wrong result is compared, resets Dynamo's compilations."""
    results = []

    def fused(function, **settings):  # type: ignore[no-untyped-def]
        def run(*arguments: object) -> object:
            results.append(arguments)
            return function(*arguments)

        return run

    def compare(call: Call, result: Run) -> judging.Difference:
        assert len(results) == 2
        return judging.Difference("wrong")

    monkeypatch.setattr(judging, "compare", compare)
    verdict = judged_with(monkeypatch, fused, replace(PLAIN, calls=({"A": 4}, {"A": 5})))
    assert verdict.reason == "call 0: wrong"
