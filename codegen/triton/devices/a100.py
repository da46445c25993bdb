"""Describes the A100 (SXM, 80 GB, sm_80).

Specifications: NVIDIA A100 Tensor Core GPU Architecture white paper, Table 4, the first of two rates, which is the
dense one; bandwidth of the 80 GB version: NVIDIA A100 data sheet.  Limits of compute capability 8.0: CUDA Programming
Guide 13, "Compute Capabilities", Tables 30 and 31.  Nothing is measured.
"""

from __future__ import annotations

from fusion.codegen.triton.devices.device import Device, Feature

A100 = Device(
    arch="sm_80",
    name="NVIDIA A100",
    multiprocessors=108,
    shared_per_program=163 << 10,
    shared_per_multiprocessor=164 << 10,
    registers=65_536,
    threads_per_program=1024,
    threads_per_multiprocessor=2048,
    warp=32,
    cache=40 << 20,
    bandwidth=2.039e6,
    flops=1.95e7,
    matrix={1: 6.24e8, 2: 3.12e8, 4: 1.56e8, 8: 1.95e7},
    features=frozenset({Feature.HALF_PAIRS, Feature.TF32, Feature.FLOAT64_UNITS, Feature.ASYNC_COPIES, Feature.PTX}),
)
