"""Every example runs, in a process of its own, and says what it promises to say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
MAX_LINES = 100

# example → what its output must hold
SAYS = {
    "vector_add.py": "n = 98,432: equal to eager in every bit",
    "softmax.py": "fused: 1 kernel,",
    "matmul_relu.py": "the matrix units are used",
    "attention.py": "backward makes the tiles again",
    "custom_activation.py": "The activation lives in",
    "train_mlp.py": "of the points are told apart",
    "aot_ptx.py": "The PTX loads from memory",
    "step_through.py": "the kernel stopped",
}


def run(name: str, *arguments: str, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "FUSION_DUMP"))}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", "FUSION_STRICT": "1"}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("name", SAYS)
def test_example(name, tmp_path):
    assert SAYS[name] in run(name, cwd=tmp_path)


def test_gpt2(tmp_path):
    pytest.importorskip("transformers")
    shown = run("gpt2.py", "--quick", "--device", "cpu", cwd=tmp_path)
    assert "ok: error against float64" in shown
    (report,) = (tmp_path / "fusion-dump").glob("*_inference/99_report.txt")
    assert str(report.relative_to(tmp_path)) in shown, "the demo must say where to read"


def test_every_example_is_listed_short_and_explained():
    found = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")}
    assert set(found) == {*SAYS, "gpt2.py"}
    for name, text in found.items():
        assert len(text.splitlines()) < MAX_LINES, name
        assert text.startswith('"""'), f"{name} says nothing about itself"
