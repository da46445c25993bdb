"""A program is saved in one process and loaded in another, which has no compiler and imports none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import fusion

LOAD = """
import subprocess, sys
import torch

def refused(*args, **kwargs):
    raise AssertionError(f"a program was started: {args}")

before = set(sys.modules)
subprocess.Popen.__init__ = refused
import fusion

artifact = fusion.load(sys.argv[1])
result = artifact(torch.arange(12.0).view(2, 6) / 12)
try:
    artifact(torch.ones(3, 6))
except fusion.ArtifactError as error:
    print(error)
new = set(sys.modules) - before
assert not new & {"torch._dynamo", "torch._inductor", "torch._functorch", "sympy", "networkx", "triton"}, new
OURS = ("fusion.lowering.", "fusion.schedule")
ours = {name for name in sys.modules if name.startswith(OURS)}
assert ours == {"fusion.lowering.errors"}, ours
#(("fusion.lowering.", "fusion.schedule")) for name in sys.modules if name != "fusion.lowering.errors")
print(result.tolist())
"""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.LayerNorm(5), nn.Softmax(-1)).eval()


def test_another_process_loads_it_without_dynamo_or_a_compiler(tmp_path: Path) -> None:
    path = tmp_path / "model.fusion"
    fusion.save(model(), path, inputs=(torch.ones(2, 6),))
    (tmp_path / "cache").mkdir()
    surroundings = {**os.environ, "CC": "no-such-compiler", "FUSION_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", LOAD, str(path)]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refusal, result = done.stdout.splitlines()
    assert refusal == "input has shape [3, 6], and this was saved for [2, 6]"
    expected = model()(torch.arange(12.0).view(2, 6) / 12)
    torch.testing.assert_close(torch.tensor(eval(result)), expected.detach())
    assert not [*(tmp_path / "cache").iterdir()]


def test_equal_programs_give_equal_files(tmp_path: Path) -> None:
    for name in ("one", "other"):
        fusion.save(model(), tmp_path / name, inputs=(torch.ones(2, 6),))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
