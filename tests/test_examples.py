"""Every example runs, in a process without pytest, and prints what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
MAX_LINES = 100

# example → lines that its output must hold
SAYS = {
    "vector_add.py": "n = 98,432: equal to eager in every bit",
    "softmax.py": "fused: 1 kernel,",
    "matmul_relu.py": "the matrix units are used",
    "attention.py": "backward recomputes the tiles",
    "custom_activation.py": "The activation lives in",
    "train_mlp.py": "of the points are classified correctly",
    "generate.py": "2 graphs were compiled",
    "aot_ptx.py": "The PTX loads from memory",
}

ELSEWHERE = {"gpt2.py", "step_through.py"}
"""Examples that have a test of their own, the latter among those that run under Triton's interpreter."""

ONE_BY_ONE = """
import contextlib, io, json, runpy, sys
import torch
shown = {}
for path in sys.argv[1:]:
    sys.argv = [path]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    shown[path] = out.getvalue()
    torch._dynamo.reset()
    torch.set_default_device(None)
print(json.dumps(shown))
"""


def run(*command: str, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "FUSION_DUMP"))}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", "FUSION_STRICT": "1"}
    command = (sys.executable, *command)
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_examples_print_the_promised_lines(tmp_path):
    """One process runs them one after the other: starting it takes longer than most of them."""
    paths = {name: str(EXAMPLES / name) for name in SAYS}
    shown = json.loads(run("-c", ONE_BY_ONE, *paths.values(), cwd=tmp_path))
    for name, path in paths.items():
        assert SAYS[name] in shown[path], name


def test_gpt2(tmp_path):
    pytest.importorskip("transformers")
    shown = run(str(EXAMPLES / "gpt2.py"), "--quick", "--device", "cpu", cwd=tmp_path)
    assert "ok: error against float64" in shown
    (report,) = (tmp_path / "fusion-dump").glob("*_inference/99_report.txt")
    assert str(report.relative_to(tmp_path)) in shown, "the demo must say where to read"


def test_every_example_is_listed_short_and_explained():
    results = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")}
    assert set(results) == {*SAYS, *ELSEWHERE}
    for name, text in results.items():
        assert len(text.splitlines()) < MAX_LINES, name
        assert text.startswith('"""'), f"{name} says nothing about itself"
