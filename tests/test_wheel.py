"""Wheel and sdist contain all that is imported, as files: links of the repository become folders.  Both are tried."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".c", ".h", ".css", ".html", ".js", ".typed")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools")


def built(what: str, source: Path, folder: Path) -> Path:
    """Build a "wheel" or an "sdist" of a source tree."""
    build = f"from setuptools import build_meta; build_meta.build_{what}({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (result,) = folder.glob("*.whl" if what == "wheel" else "*.tar.gz")
    return result


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as in the repository, without what was built in it."""
    result = tmp_path_factory.mktemp("tree") / "source"
    result.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__")
    for folder in ("fusion", "codegen", "lowering"):
        shutil.copytree(ROOT / folder, result / folder, symlinks=True, ignore=unwanted)
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, result)
    return result


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


def held_by(wheel: Path) -> set[str]:
    return {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_file(wheel: Path) -> None:
    files = (Path(folder, name) for folder, _, names in os.walk(ROOT / "fusion", followlinks=True) for name in names)
    assert held_by(wheel) == {path.relative_to(ROOT).as_posix() for path in files if path.suffix in SUFFIXES}
    assert {"fusion/py.typed", "fusion/lowering/ir/expr.py", "fusion/codegen/triton/launch/direct.c"} <= held_by(wheel)
    assert "fusion/codegen/c/standalone/fusion.h" in held_by(wheel)


def test_the_sdist_makes_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "sdist").mkdir()
    archive = built("sdist", source, tmp_path / "sdist")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert not any(path.is_symlink() for path in unpacked.rglob("*"))
    (tmp_path / "wheel").mkdir()
    assert held_by(built("wheel", unpacked, tmp_path / "wheel")) == held_by(wheel)


def test_an_installed_wheel_runs_outside_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-deps",
        "--no-compile",  # of what is not imported
        "--target",
        str(installed),
        str(wheel),
    )
    subprocess.run(install, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(installed), "FUSION_CACHE_DIR": str(tmp_path / "cache")}
    command = sys.executable, str(ROOT / "tests/installed.py"), str(installed)
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["fusion.h", "libmodel.so", "model.fusion", "model.safetensors"]
