"""Failures that random programs revealed, as Triton kernels under its interpreter."""

from __future__ import annotations

import pytest

from tests.fusion.test_regressions import REGRESSIONS
from tests.random_programs.judge import judge


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions(name: str) -> None:
    verdict = judge(REGRESSIONS[name], target="triton")
    assert verdict.status == "pass", f"{verdict.reason}\n{REGRESSIONS[name]}"
    assert verdict.kernels, "eager was compared with eager"
