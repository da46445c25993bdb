"""Describes the GeForce RTX 3090 (sm_86).

Specifications: NVIDIA Ampere GA102 GPU Architecture white paper, Table 9, the first of two rates, which is the dense
one; 16-bit floats accumulated in float32; float64 is 1/64 of float32.  Limits of compute capability 8.6: CUDA
Programming Guide 13, "Compute Capabilities", Tables 30 and 31.  Nothing is measured.
"""

from __future__ import annotations

from fusion.codegen.triton.devices.device import Device, Feature

RTX30 = Device(
    arch="sm_86",
    name="NVIDIA GeForce RTX 3090",
    multiprocessors=82,
    shared_per_program=99 << 10,
    shared_per_multiprocessor=100 << 10,
    registers=65_536,
    threads_per_program=1024,
    threads_per_multiprocessor=1536,
    warp=32,
    cache=6 << 20,
    bandwidth=9.36e5,
    flops=3.56e7,
    matrix={1: 2.84e8, 2: 7.1e7, 4: 3.56e7, 8: 5.6e5},
    features=frozenset({Feature.HALF_PAIRS, Feature.TF32, Feature.FLOAT64_UNITS, Feature.ASYNC_COPIES, Feature.PTX}),
)
