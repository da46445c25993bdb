"""Describes the B200 (SXM, sm_100).

Specifications: NVIDIA Blackwell data sheet, "Individual Blackwell GPU Specifications", column HGX B200; its rates of
the matrix units are with sparsity, these are half of them, except for float64.  It gives neither the number of
multiprocessors, which is from an article by NVIDIA ("Boost GPU Memory Performance with No Code Changes Using NVIDIA
CUDA MPS"), nor the second-level cache: the Blackwell Tuning Guide, 1.4.2.2, gives the cache of the GB200.  Limits of
compute capability 10.0: CUDA Programming Guide 13, "Compute Capabilities", Tables 30 and 31.  Nothing is measured.
"""

from __future__ import annotations

from fusion.codegen.triton.devices.device import Device, Feature

B200 = Device(
    arch="sm_100",
    name="NVIDIA B200",
    multiprocessors=148,
    shared_per_program=227 << 10,
    shared_per_multiprocessor=228 << 10,
    registers=65_536,
    threads_per_program=1024,
    threads_per_multiprocessor=2048,
    warp=32,
    cache=126 << 20,
    bandwidth=7.7e6,
    flops=7.5e7,
    matrix={1: 4.5e9, 2: 2.25e9, 4: 1.1e9, 8: 3.7e7},
    features=frozenset(
        {
            Feature.HALF_PAIRS,
            Feature.ASYNC_COPIES,
            Feature.TF32,
            Feature.FLOAT64_UNITS,
            Feature.TENSOR_COPIES,
            Feature.ASYNC_UNITS,
            Feature.DEPENDENT_LAUNCHES,
            Feature.PTX,
        }
    ),
)
