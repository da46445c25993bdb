"""Device: a GPU as a value, its published specifications beside what was measured on it.

What enters are numbers of a data sheet; what leaves is everything that generated code and its prices depend on.  What
was not measured on a device is derived from its specifications (`derived.py`); nothing outside these files names one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from fusion.codegen.attention import AttentionSpeed
from fusion.codegen.target import Layouts, OddRows

GROUPED = "generated in groups"
"""The form of attention whose warps do different things (`forms/warp_specialised/groups.py`), by name."""


class Feature(Enum):
    """What some architectures have and others lack."""

    ASYNC_UNITS = "matrix units that read shared memory by themselves (wgmma, tcgen05)"
    HALF_PAIRS = "arithmetic on pairs of bfloat16 in one register (sm_80)"
    TF32 = "matrix units for float32 rounded to 19 bits"
    FLOAT64_UNITS = "matrix units for float64 that `tl.dot` uses"
    TENSOR_COPIES = "a tensor memory accelerator, which copies blocks by descriptors (sm_90)"
    WARP_GROUPS = "products of groups of four warps, from shared memory, awaited later (wgmma, sm_90 alone)"
    PTX = "inline assembly of PTX, and what Triton compiles for NVIDIA alone"


@dataclass(frozen=True, slots=True)
class ProductSpeeds:
    """Shares of the library's speed, with aligned rows, that generated products reach (`forms/efficiency.py`).

    Attributes:
        pointers, misaligned: whose operands are loaded through pointers; from rows at odd addresses.
        several: what is left of it for several products in one loop.
        few_rows, few_long_rows: sums of products with up to four rows; where a row is longer than `long_row` bytes.
        packed_sums: what is left of that where numbers that share a byte are taken apart.
        chained, chained_pointers: of the matrix units, where results are folded or multiplied again.
        narrow_together: programs that must share a multiprocessor to hide how a narrow product converts what it loads.
        float32, float64, int8: of other dtypes than halves.
        tf32, tf32_chained: of float32 rounded to 19 bits, against the library's with the same rounding.
    """

    pointers: float
    misaligned: float
    several: float
    few_rows: float
    few_long_rows: float
    long_row: int
    packed_sums: float
    chained: float
    chained_pointers: float
    narrow_together: int
    float32: float
    float64: float
    int8: float
    tf32: float
    tf32_chained: float

    def others(self) -> dict[torch.dtype, float]:
        """The dtypes that do not run as halves do."""
        return {torch.float32: self.float32, torch.float64: self.float64, torch.int8: self.int8}


@dataclass(frozen=True, slots=True)
class PersistentShape:
    """A block of the persistent form (`forms/persistent_product/speed.py`), and how fast it is.

    Attributes:
        m, n, k: rows and columns of the block, and steps of the sum that are fetched at once.
        each: programs that share a multiprocessor.
        parts: in how many parts the columns are finished.
        share: of the library's speed, for long sums.
        apart: the same for several products that are not one (`stacked`), each with too few columns for the units.
        joined: the same for products that are one walk; 0 where it does not differ.
        end: elements of the sum that finishing a block takes as long as.
        slope: the same of an operation on each result.
        loading: the same of tiles loaded for the end.
    """

    m: int
    n: int
    warps: int
    stages: int
    share: float
    apart: float
    each: int = 1
    parts: int = 1
    joined: float = 0.0
    end: int = 137
    slope: float = 12.0
    loading: int = 740
    k: int = 64


@dataclass(frozen=True, slots=True)
class PersistentSpeeds:
    """How fast persistent products are.

    Attributes:
        library_end: elements of the sum that the end of a block takes as long as in the library's products.
        end: elements of the sum that the end of a block takes while the result fits the second-level cache.
        streamed_end: the same of a larger result, on its way to memory.
        streamed: by how much the library is faster, with a cached result, than products of streamed ones are measured.
    """

    shapes: tuple[PersistentShape, ...]
    library_end: int
    end: int
    streamed_end: int
    streamed: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a device reaches.

    Attributes:
        launch_us: microseconds of one launch.
        product_us: microseconds that the library's smallest product takes beside its launch.
        bandwidth: bytes per microsecond to memory, both directions together.
        cache_bandwidth: bytes per microsecond from the second-level cache.
        flops: float32 operations per microsecond, outside the matrix units.
        matrix_flops: operations per microsecond of the library's products of 16-bit operands.
        matrix_share: bytes of an operand's element → rate of the library's products against that.
        tf32_share: the same of float32 operands that may be rounded to 19 bits.
        attention: (form, or kernel of the library, bytes of an element) → its speed.
        tf32_attention: what differs of that where float32 operands may be rounded to 19 bits.
        narrow_tiles: tiles of a product with few rows that share a multiprocessor, where its sum is cut into parts.
        narrow_share: of the speed of memory, what such a product reaches in parts.
        waiting: of a launch, what it costs that the last program of each tile adds up its parts.
        part: elements of a contiguous part of a reduction above which more parts are better.
        layouts: what it costs to have tensors lie otherwise.
    """

    launch_us: float
    product_us: float
    bandwidth: float
    cache_bandwidth: float
    flops: float
    matrix_flops: float
    matrix_share: Mapping[int, float] = field(hash=False)
    tf32_share: float
    attention: Mapping[tuple[str, int], AttentionSpeed] = field(hash=False)
    tf32_attention: Mapping[tuple[str, int], AttentionSpeed] = field(hash=False)
    products: ProductSpeeds
    persistent: PersistentSpeeds
    odd_rows: OddRows
    narrow_tiles: int
    narrow_share: float
    waiting: float
    part: int
    layouts: Layouts


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU.

    Attributes:
        arch: what it is generated for, such as "sm_90" or "gfx942".
        name: what it is sold as.
        multiprocessors: that run programs, each several at a time.
        shared_per_program, shared_per_multiprocessor: bytes of shared memory (LDS).
        registers: of 32 bits, of a multiprocessor.
        threads_per_program, threads_per_multiprocessor: at most.
        warp: threads of a warp (wavefront).
        cache: bytes of the second-level cache.
        bandwidth: published bytes per microsecond to memory.
        flops: published float32 operations per microsecond, outside the matrix units.
        matrix: bytes of an operand's element → published operations per microsecond of the matrix units, dense, halves
            summed up in float32; of 4 bytes those of TF32.  What is not there has no matrix units.
        measured: what it reaches, where that was measured.
    """

    arch: str
    name: str
    multiprocessors: int
    shared_per_program: int
    shared_per_multiprocessor: int
    registers: int
    threads_per_program: int
    threads_per_multiprocessor: int
    warp: int
    cache: int
    bandwidth: float
    flops: float
    matrix: Mapping[int, float] = field(hash=False)
    features: frozenset[Feature]
    measured: Speeds | None = field(default=None, hash=False)

    def has(self, feature: Feature) -> bool:
        """Does the architecture have this?

        >>> from fusion.codegen.triton.devices import device_of
        >>> device_of("sm_90").has(Feature.WARP_GROUPS), device_of("sm_100").has(Feature.WARP_GROUPS)
        (True, False)
        """
        return feature in self.features

    @property
    def warps(self) -> int:
        """Warps that share a multiprocessor."""
        return self.threads_per_multiprocessor // self.warp

    @property
    def most_warps(self) -> int:
        """Warps of one program."""
        return self.threads_per_program // self.warp
