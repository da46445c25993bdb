"""A wheel contains all imported modules: links of the repository become folders."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".c", ".h", ".css", ".html", ".js", ".typed")


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools")
def test_the_wheel_holds_every_file(tmp_path: Path) -> None:
    source, built = tmp_path / "source", tmp_path / "built"
    source.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__")
    for folder in ("fusion", "codegen", "lowering"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=unwanted)
    for file in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(built)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (Path(folder, name) for folder, _, names in os.walk(ROOT / "fusion", followlinks=True) for name in names)
    assert held == {path.relative_to(ROOT).as_posix() for path in files if path.suffix in SUFFIXES}
    assert {"fusion/py.typed", "fusion/lowering/expr.py", "fusion/codegen/triton/launch/direct.c"} <= held
