"""What a target is: the protocol between the compiler and the machine.

A target turns a Kernel into source, source into something launchable, and says what it can do and what things cost
there.  Nothing outside a target's folder names it; `codegen/targets.py` has the only list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import sympy

from fusion.codegen.attention import GENERATED, AttentionSpeed
from fusion.codegen.numerics import Numerics
from fusion.lowering.errors import BuildError
from fusion.lowering.kernel import Kernel

Launcher: TypeAlias = Callable[..., None]
"""Runs one kernel: called with the tensors of `Kernel.params` in order, then its sizes as ints.  Outputs are
written in place.
"""

Refused: TypeAlias = Callable[[BuildError, Sequence[object]], None]
"""Does what a launch was to do, by other means: called with why it cannot be launched, and its arguments."""


@runtime_checkable
class LateLauncher(Protocol):
    """A launcher that may have to build or load what it launches, and raises a BuildError where that fails."""

    def __call__(self, *args: object) -> None:
        """Runs the kernel, as any launcher does."""

    def or_else(self, refused: Refused | None) -> Launcher:
        """What launches the same at less cost, and then calls `refused` instead, if given; it stores nothing before."""


def busy(tiles: int, slots: int) -> float:
    """The share of its speed at which a device makes so many tiles, of which so many run at once, two on a processor.

    Alone on its processor, one reaches three quarters.  Half of what the last round leaves idle is hidden, as measured.

    >>> busy(66, 264), busy(132, 264), busy(264, 264), busy(396, 264)
    (0.375, 0.75, 1.0, 0.875)
    """
    share = tiles / slots
    return min(1.5 * share, 0.5 + 0.5 * share) if share < 1 else 0.5 + 0.5 * share / math.ceil(share)


Stage: TypeAlias = tuple[str, "str | bytes"]
"""A named artefact on the way from source to binary: (file suffix such as "ptx", content)."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to compute a kernel: in words, as source, and its predicted time.

    Attributes:
        price: the predicted time, as a multiple of that at the full speed of the device.
    """

    name: str
    source: str
    price: float = 1.0


@dataclass(frozen=True, slots=True)
class OddRows:
    """Products of halves whose rows do not start at multiples of 16 bytes, against aligned ones.

    Attributes:
        product: the speed of a product, generated or the library's.
        walked: the speed of a walk that multiplies such rows.
        library: bytes of which all rows of operands and result start at multiples → the speed of the library's product.
    """

    product: float
    walked: float
    library: Mapping[int, float] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Layouts:
    """What it costs to have tensors lie in memory otherwise, in bytes that could be moved meanwhile.

    Attributes:
        begins: that the kernel of a copy begins and ends.
        multiplication: forward and backward, what the library's convolution of one channel each takes longer for a
            multiplication where channels come first.
    """

    begins: float
    multiplication: tuple[float, float]


ALIGNED = OddRows(1.0, 1.0, {2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0})
"""Of a device on which it does not matter where rows start."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of such a kernel; `refused` says why it does not take it."""

    name: str
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the scheduler may know about a target, which spells every scalar operation in every dtype.

    Attributes:
        fold_ops: folds that can be spelled; without "dot", contractions are left to the library.
        whole_limit: the longest reduced row, in elements, that one program holds whole.
        window_limit: the most points of a window that overlaps others which a map takes; a larger one is folded.  Of 1,
            only what folds nothing is a map.
        parallelism: how many programs keep the device busy (few rows below it call for a split reduction).
        launch_us: microseconds of one launch.
        product_us: microseconds that the library's smallest product takes beside its launch.
        bandwidth: bytes per microsecond to memory.
        flops: float operations per microsecond of the scalar units.
        matrix_flops: float operations per microsecond of the matrix units (16-bit operands), by the library.
        matrix_share: bytes of an operand's element → rate of the matrix units, or of what stands in for them, against
            16-bit operands.
        streamed: the share of that speed that contractions reach in a kernel that walks their results at once.
        padded: are axes that a walk holds whole padded to a power of two?
        alignment: bytes of which the library's products want sizes, and what rows start at, to be multiples; 1 where
            they do not care.
        lone_products: is a contraction generated where nothing walks its result?  Else it is the library's.
        attention: (the name of a form or of the library's kernel, bytes of an element) → how fast it is; what was not
            measured is not there.  Generated kernels of backward make the scores twice, which counts as arithmetic.
        forms: the names of the forms that generated kernels of several products may have.
        follows: may a fold follow the running value of another one over the same axis, at the price of other
            roundings (the online rule)?
        crowding: the share of its time that a kernel may lose to others in its launch, whose needs it has to meet.
        max_params: how many tensors one kernel may take.
        scatters: operations of `program.SCATTER_OPS` with which elements are updated at which sources may meet.
        ordered: are sources that meet taken in the order of a loop, so that the result is always the same?  Else each
            update is atomic.
        odd_rows: products of rows at odd addresses; asked only where `alignment` is more than 1.
        narrow_tiles: tiles of a product with few rows or columns that share a processor, where its sum is cut into
            parts: it waits for memory, not for matrix units.
        narrow_share: of the speed of memory, what such a product reaches in parts, whatever makes its operands.
        waiting: of a launch, what it costs that the last program of each tile adds up its parts.
        layouts: what it costs to have tensors lie otherwise.
        part: elements of a contiguous part of a reduction above which more parts are better, within bounds.
    """

    fold_ops: frozenset[str]
    whole_limit: int
    parallelism: int
    launch_us: float
    bandwidth: float
    flops: float
    matrix_flops: float
    matrix_share: Mapping[int, float] = field(default_factory=lambda: {1: 2.0, 2: 1.0, 4: 0.07, 8: 0.08})
    streamed: float = 0.5
    padded: bool = False
    alignment: int = 1
    lone_products: bool = True
    product_us: float = 0.0
    window_limit: int = 0
    attention: Mapping[tuple[str, int], AttentionSpeed] = field(default_factory=dict)
    follows: bool = True
    crowding: float = 0.0
    max_params: int = 64
    scatters: frozenset[str] = frozenset()
    ordered: bool = True
    forms: tuple[str, ...] = (GENERATED,)
    odd_rows: OddRows = ALIGNED
    narrow_tiles: int = 2
    narrow_share: float = 0.5
    waiting: float = 0.25
    part: int = 1 << 13
    layouts: Layouts = Layouts(0.0, (0.0, 0.0))


class Target(Protocol):
    """One way to run kernels; `suffix` is that of a file of its source."""

    name: str
    suffix: str
    numerics: Numerics

    @property
    def identity(self) -> str:
        """The machine that is generated for, as far as what is generated depends on it."""

    @property
    def capabilities(self) -> Capabilities:
        """What can be generated here, and what it costs."""

    def prepare(self) -> None:
        """Begin, beside what the caller does, what any build will need."""

    def lacking(self) -> str:
        """What makes launches slower on this machine than they could be; empty if nothing does."""

    def emit(self, kernel: Kernel) -> str:
        """Source text of `kernel`.  Equal kernels give equal text."""

    def refuses(self, kernel: Kernel) -> str:
        """Why `kernel` cannot be generated as one; empty if it can.  What a single node computes always can."""

    def alternatives(self, kernel: Kernel) -> Sequence[Alternative]:
        """Ways to compute `kernel` that are worth timing, the default first."""

    def efficiency(self, kernel: Kernel) -> float:
        """The share of a library's speed at which a contraction `kernel` runs here; 1 where they are equal."""

    def waits(self, kernel: Kernel) -> bool:
        """Is what a contraction `kernel` computes behind its products time of its own, beside its `efficiency`?"""

    def forms(self, kernel: Kernel) -> Sequence[Form]:
        """The forms of a kernel whose walk has several products, the one that it takes first."""

    def packs(self, first: Kernel, second: Kernel) -> bool:
        """Do two independent kernels run side by side in one launch about as fast as each alone?"""

    def finishes(self, kernel: Kernel, axis: sympy.Symbol) -> bool:
        """Can the last of the programs that differ along a GRID axis alone go on with what all of them have written?"""

    def build(self, kernel: Kernel, source: str) -> Launcher:
        """Compile `source` (of `kernel`) and return what launches it.  Thread-safe.

        Raises:
            BuildError: with the tool's own message.
        """

    def stages(self, kernel: Kernel, source: str) -> Iterator[Stage]:
        """The artefacts after the source, in order, for dumps (works without the device where the tools allow it)."""
