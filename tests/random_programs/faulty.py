"""Replaces the compiler in tests of the judge: runs the program itself, with a fault or without one."""

from __future__ import annotations

import pytest
import torch

from fusion.inspect.explanation import Explanation
from tests.random_programs import judge as judging
from tests.random_programs.inputs import Input
from tests.random_programs.judge import judge
from tests.random_programs.program import Program

PLAIN = Program(
    inputs=(Input("x0", ("A", 3), torch.float32), Input("x1", ("A", 3), torch.int64)),
    source="""
        x1.add_(1)
        return (x0 * 2, x0.t(), x1 * 3,)
    """,
    calls=({"A": 4},),
)


def wrong(part: int, change):  # type: ignore[no-untyped-def]  # any function of a tensor
    """A compiler whose code changes one of the results."""

    def fused(function, **settings):  # type: ignore[no-untyped-def]
        def run(*arguments):  # type: ignore[no-untyped-def]
            results = list(function(*arguments))
            results[part] = change(results[part])
            return tuple(results)

        return run

    return fused


def judged_with(monkeypatch: pytest.MonkeyPatch, fused, program: Program = PLAIN) -> judging.Verdict:  # type: ignore[no-untyped-def]
    """Return the judge's verdict on a program that a stand-in for the compiler runs."""
    monkeypatch.setattr(judging, "fuse", fused)
    monkeypatch.setattr(judging, "report", lambda fused: Explanation(()))
    return judge(program)
