"""Clang, as the package ziglang has it: it also compiles for other machines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_SCRIPT = """\
#!{python}
import sys
from pathlib import Path
from subprocess import run

import ziglang

arguments = [part.replace("-march=x86-64-v", "-mcpu=x86_64_v") for part in sys.argv[1:]]
zig = Path(ziglang.__file__).with_name("zig")
sys.exit(run([zig, {language!r}, *{target!r}, *arguments]).returncode)
"""


def clang(folder: Path, target: str = "", language: str = "cc") -> str:
    """Write a program that calls clang, or clang++ for the language "c++", and return its path.

    Args:
        target: the machine to compile for, such as "aarch64-linux-gnu"; by default this one.
    """
    pytest.importorskip("ziglang")
    folder.mkdir(exist_ok=True)
    path = folder / f"{language}-{target}"
    words = [f"--target={target}"] if target else []
    path.write_text(_SCRIPT.format(python=sys.executable, language=language, target=words))
    path.chmod(0o755)
    return str(path)
