"""Warm starts on a device from another machine's entries: nothing is scheduled, and Triton compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import sys, time
import torch
import fusion
import fusion.compilation.compile
from fusion.backend import fusion_backend
from triton import knobs

how, what, path = sys.argv[1:]

def f(x, w):
    return torch.softmax(torch.nn.functional.gelu(x @ w) * 3, -1)

torch.manual_seed(0)
x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
w = (torch.randn(128, 96, device="cuda", dtype=torch.bfloat16) * 0.05).requires_grad_()
misses = []
knobs.compilation.listener = lambda **told: misses.append(told["cache_hit"])
begun = time.perf_counter()
if how == "load":
    fusion.compilation.compile.schedule_graph = None
torch._dynamo.config.enable_aot_compile = True  # by default only in later releases than 2.11
program = torch.compile(f, backend=fusion_backend, fullgraph=True)
if what == "aot" and how == "save":
    program = program.aot_compile(((x, w), {}))
    program.save_compiled_function(path)
elif what == "aot":
    with open(path, "rb") as file:
        program = torch.compiler.load_compiled_function(file)
elif how == "load":
    assert torch.compiler.load_cache_artifacts(open(path, "rb").read()) is not None
result = program(x, w)
result.float().square().sum().backward()
torch.cuda.synchronize()
took = time.perf_counter() - begun
if what == "artifacts" and how == "save":
    open(path, "wb").write(torch.compiler.save_cache_artifacts()[0])
torch.testing.assert_close(result, f(x, w), rtol=2e-2, atol=2e-2)
print(f"{how} {what}: {took:.2f} s", file=sys.stderr)
print(len(misses), misses.count(False), float(w.grad.float().sum()), len(fusion.report(program).kernels))
"""


@pytest.mark.parametrize("what", ["artifacts", "aot"])
def test_a_new_process_on_empty_caches_compiles_nothing(what: str, tmp_path: Path) -> None:
    printed = []
    for how in ("save", "load"):
        folders = {"FUSION_CACHE_DIR": str(tmp_path / how / "f"), "TRITON_CACHE_DIR": str(tmp_path / how / "t")}
        environment = {**os.environ, **folders, "FUSION_GRAPH_CACHE": "1", "FUSION_STRICT": "1"}
        command = [sys.executable, "-c", PROGRAM, how, what, str(tmp_path / "kept")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        print(done.stderr.splitlines()[-1])
        printed.append(done.stdout.split())
    (calls, compiled, *results), (_, compiled_again, *results_again) = printed
    assert 0 < int(compiled) <= int(calls) and int(compiled_again) == 0
    assert results_again == results
