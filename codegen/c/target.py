"""Implements the protocol of a target for C."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import sympy

from fusion.codegen.binary import Binary
from fusion.codegen.c.blocked import MOST_BLOCK_ROWS, is_streamed, programs
from fusion.codegen.c.build import assembly, cpu_identity, lacking_threads
from fusion.codegen.c.device import NEAREST_CACHE, PRODUCT_TILES, Cpu, present
from fusion.codegen.c.forms import emit_kernel
from fusion.codegen.c.launcher import binary_of, build_kernel
from fusion.codegen.c.plan.lanes import LANE_BLOCK
from fusion.codegen.c.processor import NATIVE
from fusion.codegen.c.skinny import plan_of
from fusion.codegen.c.text.skinny import MOST_SKINNY_ROWS
from fusion.codegen.chained import GENERATED, ChainShape, fastest
from fusion.codegen.numerics import DEFAULT, Numerics
from fusion.codegen.target import EVERY, Capabilities, ChainedForm, KernelCandidate, Launcher, Stage
from fusion.lowering.ir.kernel import Fold, Kernel, statements
from fusion.lowering.ir.program import SCATTER_OPS
from fusion.lowering.ir.scalar_ops import FOLD_OPS

UNKNOWN, SEVERAL_FOLDS = 0.05, 0.6
"""Efficiencies relative to the library: of a product on a CPU that was not calibrated, so low that it stays a library
call; and of products with other folds."""


CHAINED = 1.1
"""The speed of products whose results stay in a cache, relative to GEMMs that write them
(measured: docs/performance.md, `CHAINED`)."""

LEAST_TILE_SHARE = 0.25
"""Elements of tiles that are worth a loop, relative to a GPU's: a launch is cheap, but the library's attention is slow
for few scores (measured: docs/performance.md, `LEAST_TILE_SHARE`)."""

LONGEST_WINDOW = 9
"""Points of a window that a map computes in registers.  (measured: docs/performance.md, `LONGEST_WINDOW`)"""

HELD_PART = 1 << 17
"""Bytes of the rows that a program folds before it sums their columns: with another matrix, half of an L2 cache of 512
KiB (measured: docs/performance.md, `HELD_PART`)."""


class CTarget:
    """Runs kernels on the CPU (see `fusion.codegen.target.Target`)."""

    name = "c"
    suffix = "c"

    def __init__(self, numerics: Numerics = DEFAULT) -> None:
        self.numerics = numerics
        self._unkept = ""

    @property
    def device(self) -> Cpu:
        """The CPU, with the number of threads that PyTorch uses now, unless decisions may not depend on that."""
        return replace(present(), threads=1) if self.numerics.invariant else present()

    @property
    def identity(self) -> str:
        """The CPU with its features."""
        return cpu_identity()

    @property
    def capabilities(self) -> Capabilities:
        """The operations that can be generated in C, and their costs on the threads that PyTorch uses."""
        device = self.device
        return Capabilities(
            fold_ops=frozenset(FOLD_OPS),
            whole_limit=1 << 18,
            window_limit=LONGEST_WINDOW,
            windows_in_lanes=True,
            held_row=0 if self.numerics.invariant else HELD_PART,
            held_part=HELD_PART,
            columns=LANE_BLOCK,
            parallelism=device.threads,
            rates=device.rates,
            tiles=PRODUCT_TILES,
            chained=CHAINED,
            least_tile=LEAST_TILE_SHARE,
            nearest=NEAREST_CACHE,
            outer_block=0 if self.numerics.invariant else MOST_BLOCK_ROWS,
            bounds=True,
            reports=True,
            lone_products={**EVERY, **device.products} if self._prices_all(device) else device.products,
            few_rows=0 if self.numerics.invariant else MOST_SKINNY_ROWS,
            invariant=self.numerics.invariant,
            narrow_share=math.inf,
            layouts=device.layouts,
            follows=not self.numerics.strict,
            scatters=frozenset(SCATTER_OPS),
        )

    def _prices_all(self, device: Cpu) -> bool:
        """Return whether contractions of all types are priced: those of floats were measured, or nobody asks."""
        return self.numerics.invariant or device.products.keys() >= {2, 4, 8}

    def prepare(self) -> None:
        """Do nothing: there is nothing to prepare."""

    def missing_tools(self) -> str:
        """Return why later processes cannot reuse built kernels, or why kernels run on one thread; empty if neither."""
        return f"built kernels are not kept: {self._unkept}" if self._unkept else lacking_threads()

    def emit(self, kernel: Kernel) -> str:
        """Return the C source of `kernel`.

        Raises:
            BuildError: the kernel cannot be written in C.
        """
        return emit_kernel(kernel, few_rows=not self.numerics.invariant)

    def refuses(self, kernel: Kernel) -> str:
        """Return nothing: all kernels are accepted."""
        return ""

    def alternatives(self, kernel: Kernel) -> Sequence[KernelCandidate]:
        """Return the only alternative: the C compiler makes the remaining choices."""
        return (KernelCandidate("default", self.emit(kernel)),)

    def efficiency(self, kernel: Kernel) -> float:
        """Return the efficiency that was measured, relative to the library; too few blocks leave threads idle."""
        folds = list(statements(kernel.body, Fold))
        products = [fold for fold in folds if fold.op == "dot"]
        known, busy = self.device.products, min(1.0, programs(kernel) / self.device.threads)
        if len(folds) > 1 and not is_streamed(kernel):
            faster = min((known.get(product.args[0].dtype.itemsize, 1.0) for product in products), default=1.0)
            return SEVERAL_FOLDS * busy * max(1.0, faster)
        if known and plan_of(kernel) is not None:  # of few rows, which are read again for each column
            return busy / self.device.rates.steps.refetched
        return busy * min((known.get(product.args[0].dtype.itemsize, UNKNOWN) for product in products), default=UNKNOWN)

    def exposes_epilogue(self, kernel: Kernel) -> bool:
        """Return False: epilogue time does not add to GEMM time."""
        return False

    def forms(self, kernel: Kernel) -> tuple[ChainedForm, ...]:
        """Return the only form."""
        return (ChainedForm(GENERATED),)

    def chained_share(self, chain: ChainShape, name: str = "") -> float:
        """Return the efficiency of chained products, relative to the library's GEMMs."""
        return fastest(self.device.attention, (name or GENERATED,), chain)

    def can_share_launch(self, first: Kernel, second: Kernel) -> bool:
        """Return True: the kernels run one after the other, in one call."""
        return True

    def can_reduce_in_last_block(self, kernel: Kernel, axis: sympy.Symbol) -> bool:
        """Return False: another loop over the results costs no launch."""
        return False

    def build(self, kernel: Kernel, source: str) -> Launcher:
        """Compile and load `source`; thread-safe.

        Raises:
            BuildError: no compiler, or the compiler's message.
        """
        return build_kernel(kernel, source, self._note)

    def _note(self, reason: str) -> None:
        self._unkept = reason

    def binary(self, kernel: Kernel, source: str, arch: str | None = None) -> Binary:
        """Return the object of a kernel, for this machine's CPU or for a level of x86-64.

        Raises:
            Unsupported: nothing can be compiled for `arch` here.
            BuildError: no compiler, or the compiler's message.
        """
        return binary_of(kernel, source, arch or NATIVE)

    def stages(self, kernel: Kernel, source: str) -> Iterator[Stage]:
        """Yield the assembly text.

        Raises:
            BuildError: no compiler, or the compiler's message.
        """
        yield "s", assembly(source)


__all__ = ["CTarget"]
