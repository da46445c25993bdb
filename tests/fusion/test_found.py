"""Failures that random programs have found, in results (`found_results`) and in gradients (`found_gradients`)."""

from __future__ import annotations

import pytest

from tests.fusion.found_gradients import GRADIENTS
from tests.fusion.found_results import RESULTS
from tests.random_programs.judge import judge

FOUND = RESULTS | GRADIENTS


@pytest.mark.parametrize("target", ["c", "reference"])
@pytest.mark.parametrize("name", FOUND)
def test_found(name: str, target: str) -> None:
    verdict = judge(FOUND[name], target=target)
    assert verdict.status == "pass", f"{verdict.reason}\n{FOUND[name]}"
    assert verdict.kernels, "eager was compared with eager"
