"""Describes a CPU: the throughput of its cores and its memory (measured: docs/performance.md, `device`).

`fusion calibrate` measures the CPU at hand and keeps the result in the cache directory; without it, a CPU is assumed to
equal one of two that were measured, with instructions for 16-bit floats or without, with as many threads as PyTorch
uses.  The C compiler targets the machine's own
instructions (`build.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from fusion.codegen import calibration
from fusion.codegen.c.build import cpu_identity
from fusion.codegen.chained import GENERATED, ChainSpeed
from fusion.codegen.price import Curve, Rates, Steps
from fusion.codegen.target import Layouts, NearestCache, ProductTiles

COSTS: Mapping[str, float] = {
    "sqrt": 11,
    "rsqrt": 20,
    "truediv": 6,
    "exp": 20,
    "exp2": 22,
    "log": 25,
    "log2": 16,
    "log10": 18,
    "expm1": 26,
    "log1p": 34,
    "sin": 22,
    "cos": 25,
    "tan": 31,
    "asin": 28,
    "acos": 44,
    "atan": 31,
    "sinh": 28,
    "cosh": 25,
    "tanh": 33,
    "asinh": 56,
    "acosh": 64,
    "atanh": 44,
    "erf": 32,
    "erfc": 87,
    "lgamma": 353,
    "pow": 156,
    "atan2": 48,
    "remainder": 84,
    "fmod": 77,
    "floordiv": 105,
    "maximum": 3,
    "minimum": 3,
    "checked": 14,
    "random": 210,
}
"""Operations on float32 in vectorised loops whose cost differs from `ScalarOp.cost`, relative to additions: as `fusion
calibrate` measures them on an AMD EPYC with AVX-512, GCC 12 with glibc's vector functions; of "checked" and "random" as
on an Intel Xeon."""

PRODUCT_TILES = ProductTiles(128, 256, least_columns=64, together=0.8, side=128, halved=(128, 64))
"""The tiles of products, for the scheduler: a GPU's, not measured on a CPU."""

NEAREST_CACHE = NearestCache(64, 64, 8)
"""32 KiB in lines of 64 bytes, as most cores have (measured: docs/performance.md, `NEAREST_CACHE`)."""

SHORT_SUMS = 0.5
"""The share of the rate of additions at which short sums of products run
(measured: docs/performance.md, `SHORT_SUMS`)."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """A CPU.

    Attributes:
        threads: that run kernels, one per core.
        launch_us: microseconds of one launch.
        memory: bytes that a launch of one thread touches → bytes per microsecond of one core.
        memory_cores: the number of cores that saturate memory.
        core_flops: float32 operations per microsecond of one core, in vectorised loops.
        core_matrix_flops: the same in the library's GEMMs.
        matrix_share: bytes of an operand's element → the relative rate of the library's GEMMs.
        products: bytes of an operand's element → the speed of generated GEMMs, relative to the library's; none where
            the library is not known to be slower.
        costs: operation of float32 → its time in additions.
        attention: (form, or kernel of the library, bytes of an element) → its speed.
        layouts: the costs of other tensor layouts.
        converted: nanoseconds of a cast between floats and integers of 64 bits: without an instruction that converts
            all lanes, each is converted by itself.

    >>> replace(EPYC, threads=4).rates.flops / EPYC.rates.flops
    4.0
    """

    name: str
    threads: int
    launch_us: float
    memory: Curve
    memory_cores: int
    core_flops: float
    core_matrix_flops: float
    matrix_share: Mapping[int, float] = field(hash=False)
    attention: Mapping[tuple[str, int], ChainSpeed] = field(hash=False)
    layouts: Layouts
    products: Mapping[int, float] = field(default_factory=dict, hash=False)
    costs: Mapping[str, float] = field(default_factory=lambda: COSTS, hash=False)
    converted: float = 0.0

    @property
    def rates(self) -> Rates:
        """The rates of all threads together, per microsecond."""
        cores = min(self.threads, self.memory_cores)
        nanosecond = self.core_flops / 1e3  # in additions
        return Rates(
            launch_us=self.launch_us,
            bandwidth=tuple((self.threads * touched, cores * speed) for touched, speed in self.memory),
            flops=self.core_flops * self.threads,
            matrix_flops=self.core_matrix_flops * self.threads,
            matrix_share=self.matrix_share,
            costs=self.costs,
            steps=Steps(  # fitted to the kernels of `benchmarks price` on an AMD EPYC
                fold=8 * nanosecond,
                together=2 * nanosecond,
                near=float(1 << 15),
                refetched=1.7,
                packed=0.07 * nanosecond,
                packed_by_library=0.08 * nanosecond * self.threads,  # threads do not divide it
                window=4.5 * nanosecond,
                unbounded=0.3,
                evaluated=1.5,
                one_by_one=24.0,  # maxima of 3 × 3 of an image by its channels 3.5 ns an element, of a batch norm 7
                shared=16.0,  # tanh of a 40 × 40 factor: 16 µs; as a map 1
                placed=0.18 * nanosecond,
                turned=0.12 * nanosecond,
                scanned=0.75 * nanosecond,
                logarithmic=28.0,  # an exponential and a logarithm, lane by lane
                across=0.15,
                updated=0.8 * nanosecond,
                rows=0.15,  # 1024 to 4096 rows of 768 that are added to 2 to 32: 0.1 to 0.2 ns an element
                gathered=0.7 * nanosecond,
                computed=0.07 * nanosecond,
                looked_up=5 * nanosecond,  # prefetched some rows before
                windowed=1.0,
                wide=1.0,  # half as many lanes
                converted=self.converted * nanosecond,
                widened=2.0,  # instructions: of bfloat16 a move and a shift
                narrowed=6.0,  # rounding to nearest, and NaN
                attended=1.0 * nanosecond,  # 32 heads of 64, 256 to 2048 keys; in float32 memory bounds it
            ),
            summed=SHORT_SUMS,
            overlap=2.0,
            product_overlap=2.0,
        )


BLOCKED_US = 50.0
"""Microseconds of a library's convolution beside its multiplications (measured: docs/performance.md, `BLOCKED_US`)."""


EPYC = Cpu(
    name="AMD EPYC",  # a core of one, torch 2.13
    threads=1,
    launch_us=2.0,
    memory=((1e6, 20_000.0),),
    memory_cores=10,
    core_flops=83_000.0,
    core_matrix_flops=200_000.0,
    matrix_share={1: 0.5, 2: 1.0, 4: 0.45, 8: 0.23},
    # 8 heads of 256 to 2048 rows, 64 wide; skipping is between a causal mask (1.4) and a window of 256 (0.7).
    attention={
        ("flash", 4): ChainSpeed(plain={64: (0.75, 0.71)}, skipping={64: (0.60, 0.60)}, masked={64: (0.60, 0.62)}),
        ("flash", 2): ChainSpeed(plain={64: (0.37, 0.64)}, skipping={64: (0.30, 0.40)}, masked={64: (0.30, 0.55)}),
        (GENERATED, 4): ChainSpeed(plain={64: (0.85, 0.85)}, skipping={64: (0.75, 0.88)}, masked={64: (0.8, 0.58)}),
        (GENERATED, 2): ChainSpeed(plain={64: (0.75, 0.25)}, skipping={64: (0.5, 0.25)}, masked={64: (0.6, 0.25)}),
    },
    layouts=Layouts(begins=4e4, multiplication=(0.0, 0.0), blocks=torch._C._has_mkldnn, blocked_us=BLOCKED_US),
)

EPYC_AVX2 = replace(
    EPYC,
    core_matrix_flops=10_000.0,
    matrix_share={1: 8.0, 2: 1.0, 4: 7.5, 8: 3.3},
    attention={
        **EPYC.attention,
        ("flash", 2): ChainSpeed(plain={64: (2.9, 0.68)}, skipping={64: (2.5, 0.40)}, masked={64: (2.0, 0.60)}),
        (GENERATED, 2): ChainSpeed(plain={64: (4.7, 5.0)}, skipping={64: (4.7, 4.0)}, masked={64: (4.0, 4.0)}),
    },
    products={2: 6.0},
    converted=0.7,
)
"""The same without instructions for 16-bit floats: the library multiplies them far more slowly than float32, and
generated kernels, which widen them, as fast
(measured: docs/performance.md, `EPYC_AVX2`).
"""


def assumed() -> Cpu:
    """Return the CPU that one without figures is taken for: by what PyTorch's library has instructions for."""
    halves = torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return EPYC if halves else EPYC_AVX2


def present() -> Cpu:
    """Return the CPU of this machine, with the threads that PyTorch uses: as calibrated, else as assumed."""
    threads, like = torch.get_num_threads(), assumed()
    measured = calibration.kept(cpu_identity(), threads)
    if measured is None:
        return replace(like, threads=threads)
    # Attention, the library's or generated, does not gain from the matrix units that speed GEMMs up, nor suffer from
    # their absence.
    gemms = {size: like.core_matrix_flops * like.matrix_share[size] for size in (2, 4)}
    slower = min(1.0, gemms[4] / measured.gemms.get(4, gemms[4]))
    halves = slower * gemms[2] / gemms[4] * measured.gemms.get(4, gemms[4]) / measured.gemms[2]
    return Cpu(
        name=measured.name,
        threads=threads,
        launch_us=measured.launch_us,
        memory=tuple(measured.memory),
        memory_cores=threads,
        core_flops=measured.flops,
        core_matrix_flops=measured.gemms[2],
        matrix_share={**like.matrix_share, **measured.shares},
        attention={key: speed.scaled(halves if key[1] == 2 else slower) for key, speed in like.attention.items()},
        layouts=like.layouts,
        products=measured.products,
        costs={**COSTS, **measured.costs},
        converted=like.converted,
    )
