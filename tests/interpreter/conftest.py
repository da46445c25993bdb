"""Tests of generated Triton under Triton's interpreter, on a CPU.

Triton decides on import whether it interprets, so these run only in a process started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest


class _Skipped(pytest.Module):
    """A file of tests that is not imported."""

    def collect(self) -> NoReturn:
        pytest.skip("needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return _Skipped.from_parent(parent, path=module_path)
    module: pytest.Module = pytest.Module.from_parent(parent, path=module_path)
    module.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))  # numpy, on the lanes that are masked
    return module


@pytest.fixture(autouse=True)
def _addresses_are_checked() -> Iterator[None]:
    """No unmasked lane accesses memory outside of its tensor."""
    from tests.interpreter.addresses import checked  # which imports Triton

    with checked():
        yield
