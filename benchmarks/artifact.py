"""Times artifacts: `python -m benchmarks artifact` saves GPT-2 small and loads it in new processes.

A new process imports PyTorch, loads the file, and computes the first result.  The time that it takes only to read the
weights is measured beside it.  The benchmark fails if a process takes more than `LIMIT` seconds beyond that.
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
from typing import Any

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
import fusion
loaded = fusion.load(path)
ready = time.perf_counter()
loaded(tokens)
done = time.perf_counter()
loaded(tokens)
again = time.perf_counter()
assert not {"torch._dynamo", "sympy"} & set(sys.modules)
print(json.dumps({"read": read - begin, "load": ready - read, "first": done - ready, "again": again - done}))
"""


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


def _row(name: str, rows: int, dynamic_shapes: Any) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gpt2.fusion")
        model, tokens = Logits().eval(), torch.randint(0, 50257, (1, rows))
        begin = time.perf_counter()
        fusion.save(model, path, inputs=(tokens,), dynamic_shapes=dynamic_shapes)
        saved = time.perf_counter() - begin
        starts = [_started(path, rows) for _ in range(STARTS)]
        best = min(starts, key=lambda start: start["load"] + start["first"])
        size = path.stat().st_size / 1e6
    yield (
        f"{name}: saved in {saved:.1f} s, {size:.0f} MB; loaded in {best['load']:.2f} s, of which the file is read in"
        f" {best['read']:.2f}; first result after {best['first']:.2f}, the next {best['again']:.2f}"
    )
    if best["load"] + best["first"] - best["read"] > LIMIT:
        raise Refused(f"more than {LIMIT} s to the first result")


def _started(path: Path, rows: int) -> dict[str, float]:
    command = [sys.executable, "-c", START, str(path), str(rows)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # else it is measured how long threads wait for each other's core
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=alone)
    times: dict[str, float] = json.loads(done.stdout)
    return times


def run(*, only: str, quick: bool) -> int:
    """Print a row for each case; return 1 if one takes too long."""
    varying = {"tokens": {1: Dim("tokens", min=2, max=1024)}}
    cases = [("16 tokens", None), *([] if quick else [("2 to 1024 tokens", varying)])]
    return print_rows((name, partial(_row, name, ROWS, shapes)) for name, shapes in cases if only in name)
