"""What a target is: the protocol between the compiler and the machine.

A target turns a Kernel into source, source into something launchable, and says what it can do and what things cost
there.  Nothing outside a target's folder names it; `codegen/targets.py` has the only list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import sympy

from fusion.codegen.numerics import Numerics
from fusion.lowering.errors import BuildError
from fusion.lowering.kernel import Kernel

Launcher: TypeAlias = Callable[..., None]
"""Runs one kernel: called with the tensors of `Kernel.params` in order, then its sizes as ints.  Outputs are
written in place.
"""

Refused: TypeAlias = Callable[[BuildError, Sequence[Any]], None]
"""Does what a launch was to do, by other means: called with why it cannot be launched, and its arguments."""


@runtime_checkable
class LateLauncher(Protocol):
    """A launcher that may have to build or load what it launches, and raises a BuildError where that fails."""

    def __call__(self, *args: Any) -> None:
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
    """One way to compute a kernel: in words, as source, and its predicted share of the speed of the device."""

    name: str
    source: str
    speed: float = 1.0


Shares: TypeAlias = Mapping[int, tuple[float, float]]
"""Width of a head, at most → (forward, backward), as shares of the speed of the library's plain products of the same
dtype.  Wider heads run as fast as the widest.
"""


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """How fast a kernel for attention runs, in the arithmetic of the blocks that it does not skip.

    Attributes:
        plain: without a mask.
        skipping: where blocks are left out, of which more and less falls to a program: `is_causal`, a window.
        masked: where an element of a mask is read for every score.
        begins: columns that forward could walk in the time that a block of rows takes before and after its walk.
    """

    plain: Shares
    skipping: Shares
    masked: Shares
    begins: float = 0.0

    def scaled(self, factor: float) -> AttentionSpeed:
        """The same speed as a share of products that are so much slower."""
        kinds = (self.plain, self.skipping, self.masked)
        plain, skipping, masked = ({w: (f * factor, b * factor) for w, (f, b) in kind.items()} for kind in kinds)
        return AttentionSpeed(plain, skipping, masked, self.begins)

    def forward(self, share: float, walk: float) -> float:
        """What is left of a forward share in walks of so many columns.

        >>> AttentionSpeed({}, {}, {}, begins=256.0).forward(0.9, 256.0)
        0.45
        """
        return share * walk / (walk + self.begins)


GENERATED, GROUPED = "generated", "generated in groups"
"""The forms of a kernel whose walk has several products: as most are, and in groups of warps."""


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
        follows: may a fold follow the running value of another one over the same axis, at the price of other
            roundings (the online rule)?
        crowding: the share of its time that a kernel may lose to others in its launch, whose needs it has to meet.
        max_params: how many tensors one kernel may take.
        scatters: operations of `program.SCATTER_OPS` with which elements are updated at which sources may meet.
        ordered: are sources that meet taken in the order of a loop, so that the result is always the same?  Else each
            update is atomic.
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


class Target(Protocol):
    """One way to run kernels."""

    name: str
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
