"""Describes the H200 (SXM, sm_90), the device on which this compiler was measured.

Specifications: NVIDIA H200 data sheet, column SXM; its rates of the matrix units are with sparsity, these are half of
them, except for float64.  It gives neither multiprocessors nor the second-level cache: the NVIDIA H100 Tensor Core GPU
Architecture white paper, Table 3, gives both for the H100, which is the same chip.  Limits of compute capability 9.0:
CUDA Programming Guide 13, "Compute Capabilities", Tables 30 and 31.  Measured figures say how they were measured; with
torch 2.11 and triton 3.6 unless they say otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.codegen.chained import GENERATED, ChainSpeed
from fusion.codegen.price import WIDE, Steps
from fusion.codegen.target import Layouts, MisalignedRows, ProductTiles
from fusion.codegen.triton.devices.device import (
    WARP_SPECIALISED,
    Device,
    Feature,
    PersistentShape,
    PersistentSpeeds,
    ProductSpeeds,
    Speeds,
)
from fusion.lowering.ir.scalar_ops import SCALAR_OPS, ScalarName

# The library uses cuDNN's kernel for bfloat16, also with a mask, and the memory-efficient kernel for float32 and for
# masks of three dimensions. Backward of heads wider than 128 was not measured: it is assumed to be as fast. Narrow
# windows take up to 1.6 times the predicted time. (measured: docs/performance.md, `_ATTENTION`)
_ATTENTION = {
    ("cudnn", 2): ChainSpeed(
        plain={64: (0.62, 0.67), 128: (0.87, 0.85), 256: (0.97, 0.85)},
        skipping={64: (0.53, 0.60), 128: (0.75, 0.80), 256: (0.77, 0.75)},
        masked={64: (0.35, 0.38), 128: (0.46, 0.45)},
        begins=160,
        begins_backward=530,
    ),
    ("efficient", 2): ChainSpeed(
        plain={64: (0.30, 0.25)},  # not measured; usually below the other two
        skipping={64: (0.30, 0.25)},
        masked={64: (0.06, 0.12), 128: (0.10, 0.16)},
    ),
    ("efficient", 4): ChainSpeed(
        plain={64: (0.58, 0.68), 128: (0.84, 0.69)},
        skipping={64: (0.48, 0.52), 128: (0.72, 0.58)},
        masked={64: (0.52, 0.63), 128: (0.72, 0.66)},
    ),
    (GENERATED, 2): ChainSpeed(
        plain={64: (0.64, 0.76), 128: (0.67, 0.53), 256: (0.51, 0.53)},
        skipping={64: (0.64, 0.66), 128: (0.73, 0.72), 256: (0.49, 0.72)},
        masked={64: (0.41, 0.42), 128: (0.47, 0.60)},
        begins=230,
        begins_backward=180,
    ),
    (GENERATED, 4): ChainSpeed(
        plain={64: (0.75, 0.77), 128: (0.47, 0.34)},
        skipping={64: (0.58, 0.48), 128: (0.41, 0.33)},
        masked={64: (0.71, 0.70), 128: (0.45, 0.33)},  # backward not measured
    ),
}
_ATTENTION[WARP_SPECIALISED, 2] = replace(  # backward, and kernels that read a mask, have the other form
    _ATTENTION[GENERATED, 2],
    plain={64: (0.67, 0.76), 128: (0.95, 0.53), 256: (1.07, 0.53)},
    skipping={64: (0.60, 0.66), 128: (0.94, 0.72), 256: (0.98, 0.72)},
    begins=300,
)
_ATTENTION["flash", 2] = _ATTENTION["cudnn", 2]  # not measured: assumed to be as fast

_FLOAT32, _TF32 = 0.07, 0.5
"""The speed of the library's float32 products relative to its 16-bit products: in full precision, and in TF32."""

_PRODUCTS = ProductSpeeds(  # relative to cuBLAS, over the shapes of transformer layers, in bfloat16 unless noted
    pointers=0.6,
    misaligned=0.38,  # a vocabulary of odd size
    several=0.8,
    few_rows=1.03,
    few_long_rows=0.93,
    long_row=16_384,
    packed_sums=0.4,
    chained=0.6,
    chained_pointers=0.5,
    narrow_together=3,  # not `narrow_tiles`, which counts the tiles of split-K parts
    float32=1.4,  # by three TF32 products, relative to cuBLAS in full float32
    float64=0.25,
    int8=0.6,
    tf32=0.25,  # relative to cuBLAS in TF32; descriptors are used for 16-bit floats only
    tf32_chained=0.37,
    # `mma.sync` reaches 0.63 of the published rate (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
    # Architecture via Microbenchmarking", 2024); measured: docs/performance.md, `H200`.
    by_warps=0.6,
    stepped=0.65,  # layer norms along channels as the rows of products (measured: docs/performance.md, `H200`)
)

_EPILOGUE: dict[ScalarName, int] = {
    **dict.fromkeys((name for name, row in SCALAR_OPS.items() if row.cost >= 10), 50),  # functions of CUDA's library
    "log10": 50,
    "tanh": 30,
    "erfc": 31,
    **dict.fromkeys(("truediv", "rsqrt", "sqrt"), 9),
    **dict.fromkeys(("exp", "exp2", "log", "log2"), 6),
}
"""Additions that take as long as an operation in the epilogue of a persistent product, if not as `ScalarOp.cost`."""

_PERSISTENT = PersistentSpeeds(  # fitted over the shapes of transformer layers, with ReLU, both GELUs, and a residual
    shapes=(
        PersistentShape(128, 256, 8, 3, 0.958, 0.958, loading=2000),  # loaded tiles leave memory for two stages
        PersistentShape(128, 256, 8, 3, 0.98, 0.0, parts=2, end=200, slope=16.0, loading=357),
        PersistentShape(128, 256, 8, 4, 0.95, 0.0, parts=2, joined=0.972, loading=2000),
        PersistentShape(256, 128, 8, 4, 0.945, 0.0, parts=2, loading=2000),
        PersistentShape(128, 128, 8, 3, 0.904, 0.0, each=2, parts=2, end=91, slope=8.0, loading=2000),
        PersistentShape(128, 128, 4, 3, 0.942, 0.0, each=2, parts=2, end=118, slope=10.7, loading=2000),
        PersistentShape(128, 128, 8, 4, 0.89, 0.66),
        PersistentShape(64, 256, 4, 4, 0.88, 0.62),
        PersistentShape(64, 128, 4, 4, 0.81, 0.70, each=2, slope=9.0),
    ),
    library_end=215,
    # The library's time divided by ours, 512 to 8192 rows times 32000 to 128256 columns: 0.93 to 0.98 for sums of 768,
    # 0.94 to 0.99 of 1024, 0.97 to 1.01 of 2048.
    end=137,
    streamed_end=300,
    streamed=1.096,
    costs=_EPILOGUE,
    free=3,
    by_threads=150,
    two_stages=0.7,  # measured: docs/performance.md, `H200`
    left_columns=0.96,  # measured: docs/performance.md, `H200`
    alternating=(
        PersistentShape(128, 128, 4, 7, 0.996, 0.0, end=196, slope=4.4, loading=110, second=220, further=75),
        PersistentShape(128, 128, 8, 7, 0.996, 0.0, end=202, slope=3.0, loading=110, second=220, further=75),
    ),
)

# (measured: docs/performance.md, `_MISALIGNED_ROWS`)
_MISALIGNED_ROWS = MisalignedRows(
    product=0.33,
    chained=0.45,
    library={2: 0.2, 4: 0.39, 8: 0.39, 16: 1.0},
    moved={2: 0.35, 4: 1.0, 8: 1.0, 16: 1.0},  # not measured for 4 and 8
)

H200 = Device(
    arch="sm_90",
    name="NVIDIA H200",
    multiprocessors=132,
    shared_per_program=232_448,
    shared_per_multiprocessor=233_472,
    registers=65_536,
    threads_per_program=1024,
    threads_per_multiprocessor=2048,
    warp=32,
    cache=50 << 20,
    bandwidth=4.8e6,
    flops=6.7e7,
    matrix={1: 1.979e9, 2: 9.89e8, 4: 4.95e8, 8: 6.7e7},
    features=frozenset(Feature),
    measured=Speeds(
        launch_us=4.0,
        product_us=0.7,  # cuBLAS of 5 by 10 by 5 takes 1.9 to 2.0 on the device, the generated kernel 1.0 to 1.3
        bandwidth=4.3e6,  # a copy
        cache_bandwidth=7e6,  # measured: docs/performance.md, `H200`
        flops=6.7e7,
        matrix_flops=7.5e8,  # cuBLAS, bfloat16
        matrix_share={1: 2.0, 2: 1.0, 4: _FLOAT32, 8: 0.08},
        tf32_share=_TF32,
        attention=_ATTENTION,
        tf32_attention={  # generated: 2.4 times as fast as with three products; the library's keeps full precision
            (GENERATED, 4): _ATTENTION[GENERATED, 2].scaled(0.37),
            ("efficient", 4): _ATTENTION["efficient", 4].scaled(_FLOAT32 / _TF32),
        },
        products=_PRODUCTS,
        persistent=_PERSISTENT,
        tiles=ProductTiles(128, 256, least_columns=64, together=0.8, side=128, halved=(128, 64)),
        misaligned_rows=_MISALIGNED_ROWS,
        narrow_tiles=2,  # this, `narrow_share` and `waiting` are measured: docs/performance.md, `H200`
        narrow_share=0.5,
        waiting=0.25,
        part=1 << 13,
        # Not `launch_us * bandwidth`, which is 17 MB: next to other kernels, half of a copy's launch is hidden.  The
        # convolutions are cuDNN 9's.
        layouts=Layouts(begins=8e6, multiplication=(1.5, 8.0)),
        steps=Steps(
            # Not measured: addresses, and an instruction for each element.
            gathered=32.0,
            computed=32.0,
            # The lines of a warp's 32 threads are fetched one by one: two of them in the time in which as many threads
            # as a multiprocessor has lanes add twice (measured: docs/performance.md, `H200`).
            requested=128.0,
            # These three, `followed` and `exposed` are measured: docs/performance.md, `H200`
            windowed=8.0,
            shifted=2.5,
            strided=5.0,
            wide=WIDE,
        ),
        overlap=1.0,  # measured: docs/performance.md, `H200`
        crowding=0.02,
        longest_window=25,  # longer ones are folded across threads: a pool of 3 by 3 took 13 times as long
        followed=4,  # each program waits until all that it has stored is seen by others
        exposed=0.36,
        warp_groups={3: 1.1, 2: 1.0},  # long loops, 16384 tokens of 16 heads, full blocks
        cached=0.64,
    ),
)
