"""Small programs whose dumps run: of each kind of parameter and statement, and what runs a dumped file."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import fusion

ROOT = Path(__file__).resolve().parents[3]


class Embedded(torch.nn.Module):
    """Token ids, dropout, norms, a product, softmax; with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(50, 16), torch.nn.LayerNorm(16)
        self.linear, self.dropout = torch.nn.Linear(16, 24), torch.nn.Dropout(0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.table(ids))
        return torch.softmax(self.dropout(torch.nn.functional.gelu(self.linear(hidden))), -1)


@dataclass(frozen=True, slots=True)
class Small:
    """A program, its inputs, and whether backward runs too."""

    program: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    trains: bool = False
    dynamic: bool | None = None


def programs() -> dict[str, Small]:
    """Return the programs by name, with new parameters."""
    torch.manual_seed(3)
    x, ids = torch.randn(6, 33), torch.randint(0, 50, (3, 7))
    return {
        "model": Small(Embedded(), (ids,), trains=True),
        "lambda": Small(lambda x: (x * 2).sigmoid().sum(-1), (x,)),
        "half": Small(lambda x: torch.softmax(x, -1) * 3, (x.to(torch.bfloat16),)),
        "sizes": Small(lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), (x,), dynamic=True),
        "gather": Small(lambda x, at: x.gather(1, at).exp() - 1, (x, torch.randint(0, 33, (6, 4)))),
        "scatter": Small(lambda x, at: torch.zeros(40, 33).index_add(0, at, x.sin()), (x, torch.randint(0, 40, (6,)))),
        "scan": Small(lambda x: x.cumsum(-1) / 3, (x,)),
        "integers": Small(lambda a, b: a // b + a % b, (torch.arange(30), torch.arange(1, 31))),
        "booleans": Small(lambda x, keep: torch.where(keep, x, -x).argmax(-1), (x, x > 0)),
        "changed": Small(lambda x: x.mul_(2).add_(1), (x.clone(),)),
        "probabilities": Small(lambda p, y: torch.nn.functional.binary_cross_entropy(p, y), (x.sigmoid(), x.sigmoid())),
        "number": Small(lambda x, factor: x * factor + 1, (x, torch.tensor(0.5))),
    }


def dumped(name: str, folder: Path, **options: object) -> list[Path]:
    """Compile a program with a dump; return the folders of its graphs."""
    torch._dynamo.reset()
    small = programs()[name]
    fused = fusion.fuse(small.program, dynamic=small.dynamic, options={"strict": True, "dump": folder, **options})
    result = fused(*small.inputs)
    if small.trains:
        result.square().sum().backward()
    return sorted(path for path in folder.iterdir() if path.name[4:] in ("inference", "forward", "backward"))


def run(path: Path) -> tuple[int, str]:
    """Run a file as a program of this process; return its exit code and what it prints."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return int(str(end.code)), said.getvalue()
    return 0, said.getvalue()


def run_alone(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a file as a process of its own, from another folder."""
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, str(path)]
    return subprocess.run(command, env=settings, cwd="/", capture_output=True, text=True, check=False)
