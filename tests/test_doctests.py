"""The examples in docstrings are true, in every module of the three packages that can be imported here."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lowering", "codegen", "fusion")


def modules() -> list[str]:
    """Dotted names of all modules, read from the file system: importing a package must not hide one that breaks."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1] != "__main__":  # running it is what importing it does
                found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def test_there_are_modules_to_look_at() -> None:
    assert {"lowering.expr", "lowering.rules.view", "codegen.target", "fusion.compile"} <= set(modules())


@pytest.mark.parametrize("name", modules())
def test_examples(name: str) -> None:
    if name.startswith("codegen.triton") and importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)):
        runner.run(example, clear_globs=False)  # Dynamo cleans up its own names in them, later
    assert not runner.failures
