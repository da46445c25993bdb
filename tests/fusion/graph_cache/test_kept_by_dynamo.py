"""`TORCH_CACHING_PRECOMPILE=1`, PyTorch's cache of what Dynamo captures, keeps nothing of ours and breaks nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
import fusion
from torch._dynamo.utils import counters

def f(x, w):
    return torch.softmax(torch.nn.functional.gelu(x @ w) * 3, -1).cumsum(0)

torch.manual_seed(0)
w = torch.randn(12, 8, requires_grad=True)
for program in (torch.compile(f, backend="fusion"), fusion.fuse(f)):
    for rows in (16, 17):
        x = torch.randn(rows, 12)
        result = program(x, w)
        torch.testing.assert_close(result, f(x, w))
        found, expected = (torch.autograd.grad(each.square().sum(), w)[0] for each in (result, f(x, w)))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
torch.compiler.save_cache_artifacts()
print(counters["frames"]["ok"])
"""


def test_programs_are_captured_in_each_process(tmp_path: Path) -> None:
    folders = {"FUSION_CACHE_DIR": str(tmp_path / "f"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "i")}
    switches = {"TORCH_CACHING_PRECOMPILE": "1", "FUSION_GRAPH_CACHE": "1", "FUSION_STRICT": "1"}
    (file := tmp_path / "program.py").write_text(PROGRAM)
    for _ in range(2):
        command, environment = [sys.executable, str(file)], {**os.environ, **folders, **switches}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) >= 2
