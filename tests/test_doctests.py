"""The examples in docstrings are true, in every module that can be imported here."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"lowering": "fusion.lowering", "codegen": "fusion.codegen", "fusion": "fusion"}
"""Folder → the name below which its modules are imported."""


def modules() -> list[str]:
    """Return dotted names of all modules, read from the file system: importing a package must not hide a broken one."""
    results = []
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):  # does not follow the links in `fusion/`
            parts = (package, *path.relative_to(ROOT / folder).with_suffix("").parts)
            if parts[-1] != "__main__":  # importing it runs it
                results.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return results


def test_there_are_modules_to_look_at() -> None:
    result = modules()
    assert {
        "fusion.lowering.ir.expr",
        "fusion.lowering.rules.view",
        "fusion.codegen.target",
        "fusion.compilation.compile",
    } <= {*result}
    assert len(result) == len({*result})


@pytest.mark.parametrize("name", modules())
def test_examples(name: str) -> None:
    if name.startswith("fusion.codegen.triton") and importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    runner = doctest.DocTestRunner()
    for docstring in doctest.DocTestFinder().find(importlib.import_module(name)):
        if docstring.examples:  # a run without any takes 10 ms: the debugger looks at every file that was read
            runner.run(docstring, clear_globs=False)  # Dynamo cleans up its own names in them, later
    assert not runner.failures
