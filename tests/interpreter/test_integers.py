"""Integer arguments of the caller, in Triton kernels under its interpreter."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)
pytest.importorskip("triton")

from tests.fusion.test_integers import PROGRAMS, check, check_large


@pytest.mark.parametrize("name", PROGRAMS)
def test_integers_of_any_sign(name: str) -> None:
    check(PROGRAMS[name], "triton")


def test_integers_beyond_32_bits() -> None:
    check_large("triton")
