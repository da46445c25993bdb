"""NVTX ranges of kernels, as a tool receives them: a library that NVTX loads writes each push and pop to a file."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

LISTENER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
typedef struct { size_t size; int (*functions)(int module, void ****table, unsigned *length); } Callbacks;
static FILE *steps;
static int push(const char *name) { fprintf(steps, "push %s\n", name); fflush(steps); return 0; }
static int pop(void) { fprintf(steps, "pop\n"); fflush(steps); return 0; }
int InitializeInjectionNvtx2(const void *(*exported)(uint32_t)) {
    void ***table;
    unsigned length;
    steps = fopen(getenv("NVTX_STEPS"), "w");
    if (!steps || !((const Callbacks *)exported(1))->functions(1, &table, &length)) return 0;
    *table[9] = (void *)push;  // nvtxRangePushA
    *table[11] = (void *)pop;  // nvtxRangePop
    return 1;
}
"""

PROGRAM = """
import torch, fusion
fused = fusion.fuse(lambda x: torch.softmax(x * 2, -1))
x = torch.randn(64, 100, device="cuda")
fused(x)
with torch.autograd.profiler.emit_nvtx():
    fused(x)
    fused(x)
"""


def test_each_launch_is_a_range(tmp_path: Path) -> None:
    source, library, steps = tmp_path / "listener.c", tmp_path / "listener.so", tmp_path / "steps"
    source.write_text(LISTENER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    environment = {"NVTX_INJECTION64_PATH": str(library), "NVTX_STEPS": str(steps)}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env={**os.environ, **environment})
    lines = steps.read_text().splitlines()
    pushed = [line for line in lines if line.startswith("push mul_amax_sub")]
    assert len(pushed) == 2, lines
    depths = list(accumulate(1 if line.startswith("push ") else -1 for line in lines))
    assert min(depths) == depths[-1] == 0
