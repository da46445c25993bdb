"""Describes a GPU as a value: its published specifications and, if any, its measured speeds.

Input: numbers of a data sheet; output: everything that generated code and its prices depend on.  Speeds that were not
measured are derived from the specifications (`derived.py`); nothing outside this folder names a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from fusion.codegen.chained import ChainSpeed
from fusion.codegen.price import Steps
from fusion.codegen.target import Layouts, MisalignedRows, ProductTiles
from fusion.lowering.ir.scalar_ops import SCALAR_OPS, ScalarName

WARP_SPECIALISED = "generated in groups"
"""The name of the form of attention whose warps are specialised (`forms/warp_groups/groups.py`)."""


class Feature(Enum):
    """A capability that some architectures have and others lack."""

    ASYNC_UNITS = "matrix units that read shared memory by themselves (wgmma, tcgen05)"
    HALF_PAIRS = "arithmetic on pairs of bfloat16 in one register (sm_80)"
    ASYNC_COPIES = "copies to shared memory that a program awaits later (cp.async, sm_80)"
    TF32 = "matrix units for float32 rounded to 19 bits"
    FLOAT64_UNITS = "matrix units for float64 that `tl.dot` uses"
    TENSOR_COPIES = "a tensor memory accelerator, which copies blocks by descriptors (sm_90)"
    WARP_GROUPS = "products of groups of four warps, from shared memory, awaited later (wgmma, sm_90 alone)"
    DEPENDENT_LAUNCHES = "launches that are prepared while the one before is running (sm_90)"
    PTX = "inline assembly of PTX, and features that Triton compiles for NVIDIA alone"


@dataclass(frozen=True, slots=True)
class ProductSpeeds:
    """Shares of the library's speed, with aligned rows, that generated products reach (`forms/efficiency.py`).

    Attributes:
        pointers, misaligned: operands loaded through pointers; from rows at unaligned addresses.
        several: the factor for several products in one loop.
        few_rows, few_long_rows: products with up to four rows as sums; where a row is longer than `long_row` bytes.
        packed_sums: the factor for such sums where numbers that share a byte are unpacked.
        chained, chained_pointers: shares of the matrix units for chained products.
        narrow_together: programs per multiprocessor that hide the conversion of loaded weights in a narrow product.
        float32, float64, int8: dtypes other than 16-bit floats.
        tf32, tf32_chained: float32 rounded to 19 bits, relative to the library's products with the same rounding.
        by_warps: the factor of a block with fewer rows than a group of warps multiplies (`ROWS_OF_GROUP`): each warp
            multiplies alone, with the older instruction, from registers.
        stepped: the factor where each step of the sum waits for vectors along it, as for the gains of a norm.
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
    by_warps: float
    stepped: float = 1.0

    def others(self) -> dict[torch.dtype, float]:
        """Return the shares of the dtypes that do not run at the speed of 16-bit floats."""
        return {torch.float32: self.float32, torch.float64: self.float64, torch.int8: self.int8}


@dataclass(frozen=True, slots=True)
class PersistentShape:
    """A block of the persistent form (`forms/persistent_product/speed.py`), and how fast it is.

    Attributes:
        m, n, k: rows and columns of the block, and elements of the sum that are loaded at once.
        each: programs per multiprocessor.
        parts: column parts in which the epilogue runs.
        share: share of the library's speed, for long sums.
        apart: the same for several products that are not stacked (`stacked`), each with too few columns for the units.
        joined: the same for products in one joined loop; 0 where it does not differ.
        end: time of the epilogue of a block, in elements of the sum that take as long.
        slope: the same for one operation on each result.
        loading: the same for tiles loaded by the epilogue.
        second: the same for a second tile, where groups of warps use the memory of both in turn.
        further: the same for 16 bits of results in addition to the first 16.
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
    second: int = 0
    further: int = 180
    k: int = 64


@dataclass(frozen=True, slots=True)
class PersistentSpeeds:
    """The speeds of persistent products.

    Attributes:
        library_end: time of a block's epilogue in the library's products, in elements of the sum.
        end: time of a block's epilogue, in elements of the sum, while the result fits the second-level cache.
        streamed_end: the same for a larger result, which goes to memory.
        streamed: the library's speed with a cached result, relative to its speed with a streamed one.
        costs: the additions of an epilogue that take as long as an operation, where that is not `ScalarOp.cost`.
        free: the additions for each result that its store hides.
        by_threads: time that a block takes longer, in elements of the sum, if threads store it, as no descriptor can
            hold its rows; groups of warps that take turns hide it.
        two_stages: the speed with memory for two stages beside the tiles of the epilogue, relative to more.
        left_columns: the speed of products in turn whose left operand lies transposed in memory, relative to others.
        alternating: the blocks of products whose groups of warps take turns; none where there are no such groups.
    """

    shapes: tuple[PersistentShape, ...]
    library_end: int
    end: int
    streamed_end: int
    streamed: float
    costs: Mapping[ScalarName, int] = field(hash=False)
    free: int
    by_threads: int
    two_stages: float = 1.0
    left_columns: float = 1.0
    alternating: tuple[PersistentShape, ...] = ()

    def cost(self, name: ScalarName) -> int:
        """Return the cost of an operation of an epilogue, in additions."""
        return self.costs.get(name, SCALAR_OPS[name].cost)


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds that a device reaches.

    Attributes:
        launch_us: microseconds of one launch.
        product_us: microseconds that the library's smallest product takes in addition to its launch.
        bandwidth: bytes per microsecond to memory, both directions together.
        cache_bandwidth: bytes per microsecond from the second-level cache.
        flops: float32 operations per microsecond, outside the matrix units.
        matrix_flops: operations per microsecond of the library's products of 16-bit operands.
        matrix_share: for the bytes of an operand's element, the rate of the library's products relative to that.
        tf32_share: the same for float32 operands that may be rounded to 19 bits.
        attention: the speed of each (form or kernel of the library, bytes of an element).
        tf32_attention: the entries that differ where float32 operands may be rounded to 19 bits.
        tiles: the tiles of products, for the scheduler.
        narrow_tiles: tiles per multiprocessor of a split-K product with few rows.
        narrow_share: the share of the memory bandwidth that such a product reaches.
        waiting: the cost of summing the parts in the last program of each tile, as a share of a launch.
        part: elements of a contiguous part of a reduction above which more parts are better.
        layouts: the cost of other memory layouts.
        steps: the cost of loads that threads do not share, in additions.
        overlap: how far memory and arithmetic overlap in kernels without products (`Rates.overlap`).
        crowding: the share of a kernel's time that another one in its launch costs.
        longest_window: elements of the longest window that a thread folds.
        followed: programs per multiprocessor above which it costs more to count them than to launch another kernel.
        exposed: the share of the time of a row's traffic above which other rows do not hide its arithmetic.
        warp_groups: for numbers of groups of warps, the speed of attention, relative to two.
        cached: the share of the second-level cache in which operands of concurrent programs stay.
    """

    launch_us: float
    product_us: float
    bandwidth: float
    cache_bandwidth: float
    flops: float
    matrix_flops: float
    matrix_share: Mapping[int, float] = field(hash=False)
    tf32_share: float
    attention: Mapping[tuple[str, int], ChainSpeed] = field(hash=False)
    tf32_attention: Mapping[tuple[str, int], ChainSpeed] = field(hash=False)
    products: ProductSpeeds
    persistent: PersistentSpeeds
    tiles: ProductTiles
    misaligned_rows: MisalignedRows
    narrow_tiles: int
    narrow_share: float
    waiting: float
    part: int
    layouts: Layouts
    steps: Steps
    overlap: float
    crowding: float
    longest_window: int
    followed: int
    exposed: float
    warp_groups: Mapping[int, float] = field(hash=False)
    cached: float


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU.

    Attributes:
        arch: the architecture of generated code, such as "sm_90" or "gfx942".
        name: the product name.
        multiprocessors: their number; each runs several programs at a time.
        shared_per_program, shared_per_multiprocessor: bytes of shared memory (LDS).
        registers: 32-bit registers of a multiprocessor.
        threads_per_program, threads_per_multiprocessor: the most threads of each.
        warp: the threads of a warp (wavefront).
        cache: bytes of the second-level cache.
        bandwidth: published bytes per microsecond to memory.
        flops: published float32 operations per microsecond, outside the matrix units.
        matrix: for the bytes of an operand's element, published operations per microsecond of the matrix units: dense,
            16-bit floats accumulated in float32; for 4 bytes TF32.  Sizes without an entry have no matrix units.
        measured: its measured speeds, if any.
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
        """Return whether the architecture has this feature.

        >>> from fusion.codegen.triton.devices import device_of
        >>> device_of("sm_90").has(Feature.WARP_GROUPS), device_of("sm_100").has(Feature.WARP_GROUPS)
        (True, False)
        """
        return feature in self.features

    def on_matrix_units(self, dtype: torch.dtype) -> bool:
        """Return whether `tl.dot` has an instruction for operands of `dtype`."""
        if dtype is torch.float64:
            return self.has(Feature.FLOAT64_UNITS)
        return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8)

    def input_precision(self, tf32: bool) -> str:
        """Return the precision of `tl.dot` for float32: rounded if allowed, else split in two, else exact.

        >>> from fusion.codegen.triton.devices import device_of
        >>> [device_of(arch).input_precision(False) for arch in ("sm_90", "sm_75", "gfx942")]
        ['tf32x3', 'ieee', 'ieee']
        """
        if tf32:
            return "tf32"
        return "tf32x3" if self.has(Feature.TF32) else "ieee"

    @property
    def warps(self) -> int:
        """Return the most warps per multiprocessor."""
        return self.threads_per_multiprocessor // self.warp

    @property
    def most_warps(self) -> int:
        """Return the most warps per program."""
        return self.threads_per_program // self.warp
