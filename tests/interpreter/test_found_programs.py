"""What random programs have found, as Triton kernels under its interpreter.

Triton decides on import whether it interprets, so these run only in a process started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)
pytest.importorskip("triton")

from tests.fusion.test_found import FOUND
from tests.random_programs.judge import judge

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on the lanes that are masked


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    verdict = judge(FOUND[name], target="triton")
    assert verdict.status == "pass", f"{verdict.reason}\n{FOUND[name]}"
    assert verdict.kernels, "eager was compared with eager"
