"""Describes the GeForce RTX 5090 (sm_120).

Specifications: NVIDIA RTX Blackwell GPU Architecture white paper, Table 3, the first of two rates, which is the dense
one; 16-bit floats accumulated in float32; float64 is 1/64 of float32.  Limits of compute capability 12.0: CUDA
Programming Guide 13, "Compute Capabilities", Tables 30 and 31.  Nothing is measured.
"""

from __future__ import annotations

from fusion.codegen.triton.devices.device import Device, Feature

RTX50 = Device(
    arch="sm_120",
    name="NVIDIA GeForce RTX 5090",
    multiprocessors=170,
    shared_per_program=99 << 10,
    shared_per_multiprocessor=100 << 10,
    registers=65_536,
    threads_per_program=1024,
    threads_per_multiprocessor=1536,
    warp=32,
    cache=96 << 20,
    bandwidth=1.792e6,
    flops=1.048e8,
    matrix={1: 8.38e8, 2: 2.095e8, 4: 1.048e8, 8: 1.64e6},
    features=frozenset(
        {
            Feature.HALF_PAIRS,
            Feature.ASYNC_COPIES,
            Feature.TF32,
            Feature.FLOAT64_UNITS,
            Feature.TENSOR_COPIES,
            Feature.DEPENDENT_LAUNCHES,
            Feature.PTX,
        }
    ),
)
