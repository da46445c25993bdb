"""A program's own modules may have names of the compiler's modules, and precede them on Python's path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    "codegen/__init__.py": "NAME = 'a package of the program'",
    "codegen/other.py": "def scaled(x):\n    return x * 2",
    "codegen/targets.py": "raise ImportError('nobody asked for this one')",
    "lowering.py": "import torch\n\n\ndef lowered(x):\n    return torch.softmax(x, -1)",
    "program.py": """
{first}
import torch

import codegen
import lowering
from codegen.other import scaled
{last}


def f(x):
    return lowering.lowered(scaled(x)) + 1


x = torch.randn(4, 33)
compiled = torch.compile(f, backend="fusion", options={"strict": True})
torch.testing.assert_close(compiled(x), f(x))
report = fusion.explain(f, options={"strict": True})(x)
assert len(report.kernels) > 0 and not report.externs, report
assert codegen.NAME == "a package of the program"
print(codegen.__file__, lowering.__file__)
print(*(str(origin) for kernel in report.kernels for origin in kernel.origins))
""",
}


@pytest.mark.parametrize("imported", ["first", "last"])
def test_modules_of_the_program_and_of_the_compiler_share_names(tmp_path: Path, imported: str) -> None:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        for place in ("first", "last"):
            text = text.replace(f"{{{place}}}", "import fusion" if place == imported else "")
        file.write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FUSION_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "program.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout.split()[:2] == [str(tmp_path / name) for name in ("codegen/__init__.py", "lowering.py")]
    assert "other.py:2" in ran.stdout and "lowering.py:5" in ran.stdout  # lines of the program, not ours
