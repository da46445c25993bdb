"""A file with programs, as a user has them."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = """
import torch
from torch import nn

FACTOR = 2.0

def scaled(x, y):
    return torch.relu(x) * y + FACTOR

def picked(table, rows):
    return table[rows] * 2

def untouched(x):
    return x

def dropped(x):
    return torch.dropout(x, 0.5, True)

def large(x):
    return torch.empty(1 << 60, dtype=torch.int8) + x

def fussy(x):
    return x @ torch.ones(x.shape[-1], 3, dtype=torch.float32)

def layered(x):
    return torch.relu(torch.relu(x @ x) @ x)

def keyed(x, *, weight, scale, held):
    return torch.where(held, torch.tanh(x * weight) * scale, 0.0)

def sparse(x):
    return torch.relu(x).to_sparse()

def leaves(x):
    raise SystemExit(3)

def waits(x):
    raise KeyboardInterrupt

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LayerNorm(16)

    def forward(self, x):
        return torch.tanh(self.inner(x))

class Leaves(nn.Module):
    def __init__(self):
        raise SystemExit

class Needy(nn.Module):
    def __init__(self, width):
        super().__init__()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "user_program.py"
    path.write_text(PROGRAM)
    return str(path)
