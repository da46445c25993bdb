"""Installs the wheel with each pair of a Python and a PyTorch that is supported, and uses it: `make matrix`.

    python tests/matrix.py [--pythons 3.10 3.12] [--torches 2.11] [--folder build/matrix]

Each pair gets an environment of its own below the folder, which is kept for the next time.  Interpreters are looked for
on the search path and among pyenv's.  A pair whose interpreter, or whose build of PyTorch, is not there is skipped, and
listed as such.  Returns 1 if the package fails in any other.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11", "2.12", "2.13")
SKIPPED, FAILED, RAN = "skipped", "FAILED", "ran"


def interpreter(version: str) -> str | None:
    """Return a Python of a version that runs; None if there is none."""
    managed = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    for candidate in (*map(str, managed), shutil.which(f"python{version}")):
        if candidate is not None and called(candidate, "-c", "import venv") is None:
            return candidate
    return None


def called(*command: str, cwd: Path | None = None) -> str | None:
    """Run a command; return the end of its messages if it failed, else None."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    lines = (done.stderr or done.stdout).strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def tried(version: str, torch: str, wheel: Path, folder: Path) -> tuple[str, str]:
    """Return what became of a pair, and why."""
    python = interpreter(version)
    if python is None:
        return SKIPPED, "there is no such interpreter"
    place = folder / f"python{version}-torch{torch}"
    own = str(place / "bin/python")
    if not Path(own).exists() and (failure := called(python, "-m", "venv", str(place))) is not None:
        return SKIPPED, failure
    pip = own, "-m", "pip", "install", "--quiet"
    if (failure := called(*pip, f"torch=={torch}.*", "numpy")) is not None:
        return SKIPPED, f"PyTorch is not installed: {failure}"
    # Its other dependencies come with PyTorch; Triton is for GPUs.
    if (failure := called(*pip, "--force-reinstall", "--no-deps", str(wheel))) is not None:
        return FAILED, failure
    (packages,) = place.glob("lib/python*/site-packages")
    with tempfile.TemporaryDirectory() as elsewhere:
        failure = called(own, str(ROOT / "tests/installed.py"), str(packages), cwd=Path(elsewhere))
    return (RAN, "") if failure is None else (FAILED, failure)


def built(folder: Path) -> Path:
    """Build the wheel."""
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    failure = called(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(folder / "wheel"), str(ROOT))
    if failure is not None:
        raise SystemExit(f"the wheel cannot be built: {failure}")
    (wheel,) = (folder / "wheel").glob("*.whl")
    return wheel


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all pairs; return 1 if one fails."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", nargs="+", default=PYTHONS)
    parser.add_argument("--torches", nargs="+", default=TORCHES)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/matrix")
    given = parser.parse_args(arguments)
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wheel, failed = built(folder), False
    for version in given.pythons:
        for torch in given.torches:
            outcome, reason = tried(version, torch, wheel, folder)
            failed |= outcome == FAILED
            print(f"Python {version}, PyTorch {torch}: {outcome}{': ' if reason else ''}{reason}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
