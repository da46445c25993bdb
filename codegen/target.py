"""Defines targets: the protocol between the compiler and the machine.

A target turns a Kernel into source and source into a launcher, and states its capabilities and costs.  Nothing outside
a target's folder names it; `codegen/targets.py` has the only list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import sympy

from fusion.codegen.binary import Binary
from fusion.codegen.chained import ChainShape
from fusion.codegen.numerics import Numerics
from fusion.codegen.price import Rates
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.kernel import Kernel

Launcher: TypeAlias = Callable[..., None]
"""Runs one kernel: called with the tensors of `Kernel.params` in order, then its sizes as ints.  Outputs are written in
place.
"""

OnRefusedLaunch: TypeAlias = Callable[[BuildError, Sequence[object]], None]
"""Replaces a launch: called with the reason why it is not possible, and its arguments."""


@runtime_checkable
class LateLauncher(Protocol):
    """A launcher that may have to build or load its kernel first, and raises a BuildError if that fails."""

    def __call__(self, *args: object) -> None:
        """Run the kernel."""

    def or_else(self, refused: OnRefusedLaunch | None) -> Launcher:
        """Return a cheaper launcher, which calls `refused`, if given, instead of raising; nothing is stored before."""


def busy(tiles: int, slots: int) -> float:
    """Return the efficiency of a device on `tiles` tiles, of which `slots` run at once, two per multiprocessor.

    Alone on its multiprocessor, a tile reaches three quarters.  Half of the last wave's idle time is hidden, as
    measured.

    >>> busy(66, 264), busy(132, 264), busy(264, 264), busy(396, 264)
    (0.375, 0.75, 1.0, 0.875)
    """
    share = tiles / slots
    return min(1.5 * share, 0.5 + 0.5 * share) if share < 1 else 0.5 + 0.5 * share / math.ceil(share)


def in_waves(programs: int, slots: int) -> float:
    """Return the efficiency of a device on long `programs`, of which `slots` run at once: the last ones leave others
    idle.

    >>> in_waves(8, 2), in_waves(3, 2), in_waves(1, 4)
    (1.0, 0.75, 0.25)
    """
    return programs / (slots * math.ceil(programs / slots))


@dataclass(frozen=True, slots=True)
class NearestCache:
    """The nearest cache of a core: bytes of a line, the number of sets, and the lines of each.

    >>> cache = NearestCache(64, 64, 8)
    >>> cache.keeps(256, [196]), cache.keeps(256, [2048]), cache.keeps(1024, [196])
    (True, False, False)
    """

    line: int
    sets: int
    ways: int

    def keeps(self, count: int, strides: Sequence[int]) -> bool:
        """Return whether it keeps the lines of so many elements, which are so many bytes apart, beside other data."""
        lines = [stride // self.line if stride % self.line == 0 else 1 for stride in strides]
        reached = min((self.sets // math.gcd(self.sets, step) for step in lines), default=self.sets)
        return 4 * count <= 3 * reached * self.ways


Stage: TypeAlias = tuple[str, "str | bytes"]
"""A named artefact on the way from source to binary: (file suffix such as "ptx", content)."""


@dataclass(frozen=True, slots=True)
class KernelCandidate:
    """One way to compute a kernel: in words, as source, and its predicted time.

    Attributes:
        relative_time: the predicted time relative to that at the full speed of the device.
    """

    name: str
    source: str
    relative_time: float = 1.0


@dataclass(frozen=True, slots=True)
class MisalignedRows:
    """The efficiency of 16-bit GEMMs whose rows do not start at multiples of 16 bytes, relative to aligned ones.

    Attributes:
        product: of a GEMM, generated or the library's.
        chained: of a loop that multiplies such rows.
        library: bytes to which the rows of operands and result are aligned, in 16 bits → the efficiency of the library.
        moved: the same → the share of the bandwidth of memory at which it reads and writes them.
    """

    product: float
    chained: float
    library: Mapping[int, float] = field(hash=False)
    moved: Mapping[int, float] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Layouts:
    """The costs of other tensor layouts, in bytes that could be moved in that time.

    Attributes:
        begins: the launch of a copy's kernel.
        multiplication: forward and backward, the extra time per multiplication of the library's depthwise convolution
            in channels-first layout.
        blocks: whether the library's convolutions bring images with channels first into blocks of channels, and back.
        blocked_us: the microseconds of that for a small image.
    """

    begins: float
    multiplication: tuple[float, float]
    blocks: bool = False
    blocked_us: float = 0.0


ALIGNED = MisalignedRows(1.0, 1.0, *2 * ({2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0},))
"""Of a device on which alignment does not matter."""


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The tiles of generated GEMMs, for prices.

    Attributes:
        rows, columns: the tile of one contraction that has all registers.
        least_columns: the columns below which matrix units are not filled.
        together: the speed of several contractions in one loop that cannot be stacked into one, relative to the same
            tile of one.
        side: rows and columns of the usual tile.
        halved: rows and columns of a tile of which two fit on a multiprocessor.
    """

    rows: int
    columns: int
    least_columns: int
    together: float
    side: int
    halved: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ChainedForm:
    """One form of a kernel with several products; `refused` says why the kernel cannot take it."""

    name: str
    refused: str = ""


EVERY: Mapping[int, float] = dict.fromkeys((1, 2, 4, 8, 16), 1.0)
"""Elements of all sizes, of which generated GEMMs are assumed to be as fast as the library's."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A target's capabilities and costs, for the scheduler.  Every target has every scalar operation in every dtype.

    Attributes:
        fold_ops: supported folds; without "dot", contractions are left to the library.
        whole_limit: the longest reduced row, in elements, that one program holds whole.
        followed_limit: the same of a row that only folds read, of which one needs another; one loop computes them by
            running values beyond it.  0: no other limit.
        held_row: the longest row, in elements, that a program holds beside running sums of its columns; 0: none.
        held_part: bytes of the rows that a program folds before it sums their columns, as caches hold them; 0: it
            holds one row at a time.
        columns: the most columns that a program folds, if there are enough programs then.
        window_limit: the most points of an overlapping window that a map computes; a larger one is folded.  With 1,
            only windows without a fold are maps.
        windows_in_lanes: whether lanes along contiguous results compute maps.  Then windows whose elements are under
            conditions are folded, and windows of several axes, of which one is contiguous.
        parallelism: the number of programs that occupy the device (fewer rows call for a split reduction).
        rates: the speed of the device, per microsecond.
        tiles: the tiles of generated GEMMs.
        programs_per_multiprocessor: the part of `parallelism` that one multiprocessor counts for.
        chained: the efficiency, relative to the library, of contractions in a kernel that consumes their results in
            one loop.
        least_tile: the elements of tiles that are worth a loop, relative to those on a GPU.
        bounds: whether a loop over tiles begins and ends where numbers in memory say, rather than to test each block.
        reports: whether a launch raises an error where a check of data fails.
        outer_block: the rows that a program takes at once where it loops over rows, and over columns inside, and folds
            along both; 0: it cannot.
        narrow: whether GEMMs of operands that are only widened run at the rate of their type (`narrow_factors`).
        padded: whether WHOLE axes are padded to a power of two.
        alignment: bytes to which the library's GEMMs want sizes and rows aligned; 1 if it does not matter.
        lone_products: bytes of an operand's element → the speed of generated GEMMs, relative to the library's, before
            their configuration is known.  A contraction whose result no loop consumes is priced if its type is listed;
            else it is the library's.
        few_rows: the most rows with which contractions may be reductions like others, outside of such loops, which the
            price decides; 0: none.
        follows: whether a fold may be rescaled by the running value of another one over the same axis, which rounds
            differently (online rule).
        crowding: the share of its time that a kernel may lose to others in its launch, whose resources it has to share.
        max_params: the most tensors of one kernel.
        most_followed: the most programs of a launch that another kernel follows, as each has to be counted; 0: any
            number.
        scatters: operations of `program.SCATTER_OPS` that colliding writes may use.
        ordered: whether colliding writes happen in loop order, so that the result is deterministic; else each is
            atomic.
        misaligned_rows: GEMMs of unaligned rows; used only if `alignment` is more than 1.
        narrow_tiles: tiles per multiprocessor of a split-K GEMM with few rows or columns: it is bound by memory
            latency, not by tensor cores.
        narrow_share: the share of the memory bandwidth that such a split-K GEMM reaches, whatever its prologue.
        waiting: the cost, in launches, of combining partial results in the last program of each tile.
        layouts: the costs of other tensor layouts.
        sector: bytes of the smallest memory request; 0 if the price of reading across memory is not known.
        nearest: the cache whose lines elements of a row fill that are stored apart; None if that does not matter.
        part: elements of a contiguous part of a reduction above which more parts are better, within bounds.
        scans: whether scans of floats are generated; else they are library calls.
        trial: seconds that the first trial of two ways to compute a product takes in a process: two compilations, and
            some runs.
        invariant: whether the order of operations in a row may depend on the row alone: not on the number of rows, on
            the parallelism of the device, or on fusion.
    """

    fold_ops: frozenset[str]
    whole_limit: int
    parallelism: int
    rates: Rates
    tiles: ProductTiles
    programs_per_multiprocessor: int = 2
    followed_limit: int = 0
    chained: float = 0.5
    least_tile: float = 1.0
    bounds: bool = False
    reports: bool = False
    outer_block: int = 0
    narrow: bool = False
    padded: bool = False
    held_row: int = 0
    held_part: int = 0
    columns: int = 0
    alignment: int = 1
    lone_products: Mapping[int, float] = field(default_factory=lambda: EVERY, hash=False)
    few_rows: int = 0
    window_limit: int = 0
    windows_in_lanes: bool = False
    follows: bool = True
    crowding: float = 0.0
    max_params: int = 64
    most_followed: int = 0
    scatters: frozenset[str] = frozenset()
    ordered: bool = True
    misaligned_rows: MisalignedRows = ALIGNED
    narrow_tiles: int = 2
    narrow_share: float = 0.5
    waiting: float = 0.25
    part: int = 1 << 13
    scans: bool = True
    trial: float = 0.4
    invariant: bool = False
    sector: int = 0
    nearest: NearestCache | None = None
    layouts: Layouts = Layouts(0.0, (0.0, 0.0))

    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors."""
        return self.parallelism // self.programs_per_multiprocessor

    def product_us(self, operations: float, itemsize: int) -> float:
        """Return the microseconds of a GEMM of so many operations on elements of `itemsize` bytes, the library's or a
        generated one.
        """
        return self.rates.product_us_of(operations, itemsize) / max(1.0, self.lone_products.get(itemsize, 0.0))


class Target(Protocol):
    """One way to run kernels; `suffix` is the file suffix of its source."""

    name: str
    suffix: str
    numerics: Numerics

    @property
    def identity(self) -> str:
        """The machine, as far as generated code depends on it."""

    @property
    def capabilities(self) -> Capabilities:
        """The supported operations, and their costs."""

    def prepare(self) -> None:
        """Start the tools of a build, concurrently with the caller."""

    def missing_tools(self) -> str:
        """Return the reason why launches are slower on this machine than necessary; empty if there is none."""

    def emit(self, kernel: Kernel) -> str:
        """Return the source of `kernel`.  Equal kernels give equal text."""

    def refuses(self, kernel: Kernel) -> str:
        """Return why `kernel` cannot be generated as one kernel; empty if it can.  A single node always can."""

    def alternatives(self, kernel: Kernel) -> Sequence[KernelCandidate]:
        """Return the configurations of `kernel` that are worth timing, the default first."""

    def efficiency(self, kernel: Kernel) -> float:
        """Return the efficiency of a contraction `kernel` relative to the library; 1 if they are equal."""

    def exposes_epilogue(self, kernel: Kernel) -> bool:
        """Return whether the epilogue time of a contraction `kernel` adds to its GEMM time, beside its `efficiency`."""

    def forms(self, kernel: Kernel) -> Sequence[ChainedForm]:
        """Return the forms of a kernel whose loop has several products, the default first."""

    def chained_share(self, chain: ChainShape, name: str = "") -> float:
        """Return the efficiency of chained products, relative to the library's GEMMs.

        Args:
            chain: the products; generated backward kernels compute the scores twice, which counts as arithmetic.
            name: the name of a form, or of the library's kernel; empty: the fastest form that is generated.

        Raises:
            Unsupported: it was not measured for these operands.
        """

    def can_share_launch(self, first: Kernel, second: Kernel) -> bool:
        """Return whether two independent kernels run in one launch about as fast as each alone (horizontal fusion)."""

    def can_reduce_in_last_block(self, kernel: Kernel, axis: sympy.Symbol) -> bool:
        """Return whether the last of the programs along a GRID axis can continue with the results of all of them."""

    def build(self, kernel: Kernel, source: str) -> Launcher:
        """Compile `source` (of `kernel`) and return its launcher.  Thread-safe.

        Raises:
            BuildError: with the tool's own message.
        """

    def binary(self, kernel: Kernel, source: str, arch: str | None = None) -> Binary:
        """Return `kernel` compiled for an architecture, by default the one at hand.  Thread-safe.

        Raises:
            Unsupported: the target has no binaries, or none for `arch`.
            BuildError: with the tool's own message.
        """

    def stages(self, kernel: Kernel, source: str) -> Iterator[Stage]:
        """Yield the artefacts after the source, in order, for dumps (without the device if the tools allow it)."""
