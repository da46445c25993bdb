"""Times artifacts: `python -m benchmarks artifact` saves GPT-2 small and loads it in new processes.

A new process imports PyTorch, loads the file, and computes the first result.  The time that it takes only to read the
weights is measured beside it.  AOTInductor's package of the same program is measured in the same way.  The benchmark
fails if an artifact takes more than `LIMIT` seconds beyond reading.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

import fusion
from benchmarks.harness import Refused
from benchmarks.suite import print_rows

LIMIT = 1.0
"""Seconds from `import torch` to the first result, without reading the weights."""

STARTS = 3
"""New processes, of which the fastest counts: others use the machine, too."""

ROWS = 16
"""Tokens of a call: with many, their products would be most of what is measured."""

START = """
import json, sys, time
import torch
path, rows = sys.argv[1], int(sys.argv[2])
tokens = torch.randint(0, 50257, (1, rows))
begin = time.perf_counter()
open(path, "rb").read()
read = time.perf_counter()
{load}
ready = time.perf_counter()
with torch.no_grad():
    loaded(tokens)
    done = time.perf_counter()
    loaded(tokens)
again = time.perf_counter()
dynamo = bool({{"torch._dynamo", "sympy"}} & set(sys.modules))
times = {{"read": read - begin, "load": ready - read, "first": done - ready, "again": again - done}}
print(json.dumps({{**times, "dynamo": dynamo}}))
"""

LOADS = {
    "artifact": "import fusion\nloaded = fusion.load(path)",
    "aotinductor": "from torch._inductor import aoti_load_package\nloaded = aoti_load_package(path)",
}
"""How a process loads a file: by tool."""


class Logits(nn.Module):
    """GPT-2 small with random weights, from tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config(use_cache=False))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (1, tokens, 50257) for tokens (1, tokens)."""
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits


def _save(tool: str, path: Path, model: nn.Module, tokens: Tensor, dynamic_shapes: object) -> None:
    if tool == "artifact":
        fusion.save(model, path, inputs=(tokens,), dynamic_shapes=dynamic_shapes)
        return
    from torch._inductor import aoti_compile_and_package

    with torch.no_grad():
        exported = torch.export.export(model, (tokens,), dynamic_shapes=dynamic_shapes)
        aoti_compile_and_package(exported, package_path=str(path))


def _row(name: str, tool: str, rows: int, dynamic_shapes: object) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gpt2.fusion" if tool == "artifact" else "gpt2.pt2")
        model, tokens = Logits().eval(), torch.randint(0, 50257, (1, rows))
        begin = time.perf_counter()
        _save(tool, path, model, tokens, dynamic_shapes)
        saved = time.perf_counter() - begin
        starts = [_started(tool, path, rows) for _ in range(STARTS)]
        best = min(starts, key=lambda start: start["load"] + start["first"])
        size = path.stat().st_size / 1e6
    yield (
        f"{name}: saved in {saved:.1f} s, {size:.0f} MB; loaded in {best['load']:.2f} s, of which the file is read in"
        f" {best['read']:.2f}; first result after {best['first']:.2f}, the next {best['again']:.2f}"
    )
    if tool != "artifact":
        return
    assert not best["dynamo"], "Dynamo was imported"
    if best["load"] + best["first"] - best["read"] > LIMIT:
        raise Refused(f"more than {LIMIT} s to the first result")


def _started(tool: str, path: Path, rows: int) -> dict[str, float]:
    command = [sys.executable, "-c", START.format(load=LOADS[tool]), str(path), str(rows)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # else it is measured how long threads wait for each other's core
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=alone)
    times: dict[str, float] = json.loads(done.stdout)
    return times


def run(*, only: str, quick: bool) -> int:
    """Print a row for each case; return 1 if one takes too long."""
    varying = {"tokens": {1: Dim("tokens", min=2, max=1024)}}
    cases = [("16 tokens", None), *([] if quick else [("2 to 1024 tokens", varying)])]
    named = [(f"{name}, {tool}", tool, shapes) for name, shapes in cases for tool in LOADS]
    return print_rows((name, partial(_row, name, tool, ROWS, shapes)) for name, tool, shapes in named if only in name)
