"""Failures that random programs revealed, as Triton kernels under its interpreter."""

from __future__ import annotations

import pytest

from tests.fusion.test_found import FOUND
from tests.random_programs.judge import judge


@pytest.mark.parametrize("name", FOUND)
def test_regressions(name: str) -> None:
    verdict = judge(FOUND[name], target="triton")
    assert verdict.status == "pass", f"{verdict.reason}\n{FOUND[name]}"
    assert verdict.kernels, "eager was compared with eager"
