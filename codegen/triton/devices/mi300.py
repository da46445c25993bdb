"""Describes the MI300X (gfx942).

Specifications: ROCm documentation, "AMD Instinct MI300 Series microarchitecture", the table of the peak performance of
the MI300X, which is dense; compute units, LDS, vector registers and second-level cache, the sum of eight dies: its "AMD
GPU specifications".  Threads: eight wavefronts of each of four SIMDs, which these pages do not give.  Nothing is
measured.
"""

from __future__ import annotations

from fusion.codegen.triton.devices.device import Device

MI300 = Device(
    arch="gfx942",
    name="AMD Instinct MI300X",
    multiprocessors=304,
    shared_per_program=64 << 10,
    shared_per_multiprocessor=64 << 10,
    registers=131_072,
    threads_per_program=1024,
    threads_per_multiprocessor=2048,
    warp=64,
    cache=32 << 20,
    bandwidth=5.3e6,
    flops=1.634e8,
    matrix={1: 2.6149e9, 2: 1.3074e9, 4: 6.537e8, 8: 1.634e8},
    features=frozenset(),
)
