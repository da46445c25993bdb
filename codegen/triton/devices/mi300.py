"""MI300X (gfx942).

Specifications: AMD Instinct MI300X data sheet, dense; limits: AMD CDNA 3 white paper and ISA guide.  The second-level
cache is the sum of eight dies.  Nothing is measured.
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
