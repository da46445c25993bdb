"""Describes the GeForce RTX 4090 (sm_89).

Specifications: NVIDIA Ada GPU Architecture white paper, Table 2, the first of two rates, which is the dense one; 16-bit
floats accumulated in float32; float64 is 1/64 of float32.  Limits of compute capability 8.9: CUDA Programming Guide 13,
"Compute Capabilities", Tables 30 and 31.  Nothing is measured.
"""

from __future__ import annotations

from fusion.codegen.triton.devices.device import Device, Feature

RTX40 = Device(
    arch="sm_89",
    name="NVIDIA GeForce RTX 4090",
    multiprocessors=128,
    shared_per_program=99 << 10,
    shared_per_multiprocessor=100 << 10,
    registers=65_536,
    threads_per_program=1024,
    threads_per_multiprocessor=1536,
    warp=32,
    cache=72 << 20,
    bandwidth=1.008e6,
    flops=8.26e7,
    matrix={1: 6.61e8, 2: 1.652e8, 4: 8.26e7, 8: 1.29e6},
    features=frozenset({Feature.HALF_PAIRS, Feature.TF32, Feature.FLOAT64_UNITS, Feature.ASYNC_COPIES, Feature.PTX}),
)
