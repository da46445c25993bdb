"""Benchmarks CPU kernels: Fusion's C against TorchInductor's C++ and eager, on two threads; also cold compilation."""

from __future__ import annotations

import torch

from benchmarks import programs
from benchmarks.programs import attention_case, cross_entropy_case, row_case, vector_case
from benchmarks.suite import run_suite

DEVICE = "cpu"
THREADS = 2
F32 = torch.float32

torch.set_num_threads(THREADS)

CASES = (
    vector_case(98_432, F32),
    vector_case(1 << 22, F32),
    row_case(programs.gelu_chain, 1024, 1024, F32, vectors=1),
    row_case(programs.bias_gelu, 512, 3072, F32, vectors=1),
    row_case(programs.softmax, 4096, 781, F32),
    row_case(programs.softmax, 1024, 4096, F32),
    row_case(programs.layer_norm, 4096, 1024, F32, vectors=2),
    row_case(programs.rms_norm, 2048, 2048, F32, vectors=1),
    cross_entropy_case(512, 8192, F32),
    attention_case(programs.attention, 8, 1024, 64, F32),
    attention_case(programs.causal_attention, 8, 2048, 64, F32),
)


def run(*, only: str, quick: bool) -> int:
    print(f"{THREADS} threads, float32, torch {torch.__version__}; GB/s counts each input and output once")
    return run_suite("cpu", CASES, DEVICE, rounds=7 if quick else 25, cold=not quick, only=only)
