"""Which differences from eager the judge of random programs excuses, as PyTorch's own capture has them, too."""

from __future__ import annotations

import pytest
import torch

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
