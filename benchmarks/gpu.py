"""Benchmarks GPU kernels: Fusion's Triton against TorchInductor (default mode) and eager; device time, L2 cold."""

from __future__ import annotations

import torch

from benchmarks import programs
from benchmarks.programs import Case, Draw, attention_case, cross_entropy_case, row_case, vector_case
from benchmarks.suite import run_suite

DEVICE = "cuda"
F32, BF16 = torch.float32, torch.bfloat16

ATTENTION = (programs.attention, programs.causal_attention)
CASES = (
    vector_case(98_432, F32),
    vector_case(1 << 26, F32),
    row_case(programs.pointwise_chain, 8192, 4096, BF16, vectors=1),
    row_case(programs.gelu_chain, 8192, 4096, BF16, vectors=1),
    row_case(programs.bias_gelu, 8192, 4096, BF16, vectors=1),
    *(row_case(programs.softmax, 4096, columns, F32) for columns in (781, 1024, 4096, 16384)),
    *(row_case(programs.layer_norm, 8192, columns, BF16, vectors=2) for columns in (1024, 4096)),
    row_case(programs.rms_norm, 8192, 4096, BF16, vectors=1),
    cross_entropy_case(4096, 50_257, BF16),
    *(Case(f"matmul_relu {n}x{n}x{n}", programs.matmul_relu, (Draw((n, n), BF16),) * 2) for n in (1024, 4096, 8192)),
    *(attention_case(program, 32, 4096, width, BF16) for program in ATTENTION for width in (64, 128)),
)


def run(*, only: str, quick: bool) -> int:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; GB/s counts each input and output once")
    return run_suite("gpu", CASES, DEVICE, rounds=20 if quick else 100, cold=not quick, only=only)
