"""Regressions: minimised failures of random programs, in results and in gradients."""

from __future__ import annotations

import pytest

from tests.fusion.forward_regressions import RESULTS
from tests.fusion.gradient_regressions import GRADIENTS
from tests.random_programs.judge import judge

REGRESSIONS = RESULTS | GRADIENTS


@pytest.mark.parametrize("target", ["c", "reference"])
@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions(name: str, target: str) -> None:
    verdict = judge(REGRESSIONS[name], target=target)
    assert verdict.status == "pass", f"{verdict.reason}\n{REGRESSIONS[name]}"
    assert verdict.kernels, "eager was compared with eager"
