"""Which differences from eager the judge of random programs excuses, as PyTorch's own capture has them, too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.random_programs.fake_layouts import Faked
from tests.random_programs.faulty import judged_with, wrong
from tests.random_programs.inputs import Input
from tests.random_programs.judge import judge
from tests.random_programs.program import Program


def test_a_refused_call_that_the_capture_gives_other_views_is_not_held_against_the_compiler() -> None:
    program = Program(
        inputs=(Input("x0", ("A",), torch.float32, layout="offset"),),
        source="""
            x0.unsqueeze(-1).mul_(2)
            return (x0.unsqueeze(-1).expand(*x0.shape, 2),)
        """,
        calls=({"A": 6},),
        dynamic=True,
    )
    verdict = judge(program)
    assert verdict.status == "skipped" and "a result is a view of it" in verdict.reason


def test_strides_are_also_excused_by_the_metadata_of_the_decomposed_graph() -> None:
    """Fake tensors forget the stride of an axis of size 1, which decides the layout of the product."""
    program = Program(
        inputs=(Input("x0", ("A", 1), torch.float32, layout="transposed"),),
        source="""
            t0 = x0 * 1
            t0.transpose(0, -1).cumsum_(0)
            return (torch.einsum('id,jd->ij', t0, t0.sort(1)[0] * 2),)
        """,
        calls=({"A": 16},),
    )
    verdict = judge(program)
    assert verdict.status == "pass"
    assert verdict.excused == [
        "call 0: result 0 of shape [16, 16] has strides (1, 16), eager's (16, 1), as PyTorch's fake tensors say"
    ]


DATA_SIZED = Program(
    inputs=(Input("x0", ("A", 3), torch.float32, layout="transposed"), Input("x1", ("A",), torch.int64)),
    source="""
        return (F.logsigmoid(x0), x1.abs().bincount(minlength=9) * 2,)
    """,
    calls=({"A": 4},),
)
"""Fake tensors err on the strides of the first result, and know the size of the second from data alone."""


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        (0, lambda t: t.t().contiguous().t(), ""),  # as fake tensors say
        (0, lambda t: t.double(), "result 0 is torch.float64"),
        (1, lambda t: t[1:], "result 1 is torch.int64"),
    ],
)
def test_a_size_that_only_data_say_is_compared(monkeypatch: pytest.MonkeyPatch, part: int, change, reason: str) -> None:  # type: ignore[no-untyped-def]
    verdict = judged_with(monkeypatch, wrong(part, change), DATA_SIZED)
    assert verdict.status == ("mismatch" if reason else "pass") and reason in verdict.reason
    strides = "call 0: result 0 of shape [4, 3] has strides (1, 4), eager's (3, 1), as PyTorch's fake tensors say"
    assert verdict.excused == ([] if reason else [strides])


def test_data_dependent_strides_are_compared_operation_by_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eager gives a gathered tensor its index's layout, fake tensors do not; with real ones they refuse the sum."""
    program = Program(
        inputs=(Input("x0", ("A", 3), torch.float32),),
        source="""
            t0 = x0.clamp(min=0).nonzero()
            return (x0[t0 % x0.shape[0]], t0.sum(0, dtype=torch.int32),)
        """,
        calls=({"A": 6},),
    )
    assert program.function()(*program.tensors(0))[0].stride() == (3, 33, 1)
    verdict = judged_with(monkeypatch, wrong(0, lambda t: t.contiguous()), program)
    assert verdict.status == "pass" and "result 0 of shape [11, 2, 3]" in verdict.excused[0]
    assert judged_with(monkeypatch, wrong(0, lambda t: t.mT.contiguous().mT), program).status == "mismatch"


def test_a_shape_without_elements_is_that_of_fake_tensors() -> None:
    """Eager returns its operand."""
    empty = torch.ones(20, 20, 0)
    assert torch.pixel_unshuffle(empty, 2).shape == (20, 20, 0)
    with Faked():
        assert torch.pixel_unshuffle(empty, 2).shape == (80, 10, 0)
        assert torch.pixel_unshuffle(torch.ones(20, 20, 2), 2).shape == (80, 10, 1)


MISTRACED = Program(
    inputs=(Input("x0", ("A", 5), torch.float32, grad=True), Input("x1", ("A", 5), torch.int64)),
    source="""
        t0 = torch.where(torch.arange(5, device=x1.device) > 1, -1, x1.abs() % 5)
        return (x0 * 2, F.multilabel_margin_loss(x0, t0),)
    """,
    calls=({"A": 3}, {"A": 3}),
)
"""PyTorch's capture also counts class 0 for each -1 of the second result; eager does not."""


def mistraced(function, **settings):  # type: ignore[no-untyped-def]
    return torch.compile(function, backend="aot_eager")


def test_a_result_that_is_wrong_as_the_capture_has_it_is_excused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = judged_with(monkeypatch, mistraced, MISTRACED)
    assert verdict.status == "pass" and len(verdict.excused) == 2
    assert verdict.excused[1].startswith("call 1: result 1 of torch.float32[] is ")
    assert verdict.excused[1].endswith("as in PyTorch's capture")


@pytest.mark.parametrize("change", [lambda t: t * 1.01, lambda t: t * torch.nan])
def test_a_result_that_is_wrong_otherwise_than_the_captures_is_a_mismatch(
    monkeypatch: pytest.MonkeyPatch, change
) -> None:  # type: ignore[no-untyped-def]
    def fused(function, **settings):  # type: ignore[no-untyped-def]
        return wrong(1, change)(mistraced(function))

    verdict = judged_with(monkeypatch, fused, MISTRACED)
    assert verdict.status == "mismatch" and not verdict.excused and "result 1" in verdict.reason


def test_an_excuse_hides_no_other_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(function, **settings):  # type: ignore[no-untyped-def]
        return wrong(0, lambda t: t + 1)(mistraced(function))

    verdict = judged_with(monkeypatch, fused, MISTRACED)
    assert verdict.status == "mismatch" and "result 0" in verdict.reason


UNCAPTURED = Program(
    inputs=(Input("x0", (2, 6), torch.float32),),
    source="""
        t0 = (x0 * 2).unflatten(-1, (2, -1)).mT
        t0.index_add_(-1, torch.arange(2, device=t0.device), t0 * 0.5)
        return (t0,)
    """,
    calls=({},),
)
"""PyTorch's capture views the result of `index_add_` for a transposed matrix as if it were contiguous."""

CAPTURED = replace(UNCAPTURED, source=UNCAPTURED.source.replace(".mT", ".mT.contiguous()"))


@pytest.mark.parametrize(("program", "status"), [(UNCAPTURED, "skipped"), (CAPTURED, "error")])
@pytest.mark.parametrize("strictly", [False, True])
def test_failures_count_unless_the_capture_fails_too(
    monkeypatch: pytest.MonkeyPatch, program: Program, status: str, *, strictly: bool
) -> None:
    def fused(function, **settings):  # type: ignore[no-untyped-def]
        def fails(*arguments: object) -> None:
            raise ValueError("not to be compiled")

        return function if strictly and not settings["options"]["strict"] else fails

    verdict = judged_with(monkeypatch, fused, program)
    assert verdict.status == status and "not to be compiled" in verdict.reason


def test_the_fallback_of_a_program_that_cannot_be_captured_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(UNCAPTURED).status == "skipped"

    def fused(function, **settings):  # type: ignore[no-untyped-def]
        if not settings["options"]["strict"]:
            return wrong(0, lambda t: t + 1)(function)
        return torch.compile(function, backend="aot_eager")

    verdict = judged_with(monkeypatch, fused, UNCAPTURED)
    assert verdict.status == "mismatch" and "result 0" in verdict.reason
