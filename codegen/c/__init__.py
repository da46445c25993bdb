"""The C target: kernels for CPU tensors as plain C, built by the system's compiler.

Input: a Kernel; output: one C function, threads over its grid axes and SIMD lanes over the innermost, and a launcher
for it.  Contractions are computed tile by tile (`blocked`), but not announced as capabilities: alone, or with only
element-wise neighbours, they stay library calls, which take a bias along.

kernel → forms → plan → loops     `text` is what each of them writes with
               → plan → blocked   where there are products, running values
text   → frame → build → launcher

`forms.py` lists the ways to write a kernel; `loops/function.py` and `blocked/function.py` are the paths of a kernel to
its text; each other file decides one thing on them, and each package says which things.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from fusion.codegen.c.build import assembly, build_kernel, cpu_identity
from fusion.codegen.c.device import Cpu, present
from fusion.codegen.c.emit import emit_kernel
from fusion.codegen.chained import GENERATED, Chain, fastest
from fusion.codegen.numerics import DEFAULT, Numerics
from fusion.codegen.target import Alternative, Capabilities, Form, Launcher, Stage
from fusion.lowering.kernel import Fold, Kernel, statements
from fusion.lowering.program import SCATTER_OPS
from fusion.lowering.scalar_ops import FOLD_OPS

ONE_FOLD, SEVERAL_FOLDS = 0.05, 0.6
"""Efficiencies relative to the library: so low that every single product stays a library call; and with other folds."""


class CTarget:
    """Runs kernels on the CPU (see `fusion.codegen.target.Target`)."""

    name = "c"
    suffix = "c"

    def __init__(self, numerics: Numerics = DEFAULT) -> None:
        self.numerics = numerics
        self._unkept = ""

    @property
    def device(self) -> Cpu:
        """The CPU, with the number of threads that PyTorch uses now."""
        return present()

    @property
    def identity(self) -> str:
        """The CPU with its features."""
        return cpu_identity()

    @property
    def capabilities(self) -> Capabilities:
        """What can be generated in C, and its costs on the threads that PyTorch uses."""
        device = self.device
        return Capabilities(
            fold_ops=frozenset(FOLD_OPS),
            whole_limit=1 << 18,
            window_limit=1,
            parallelism=device.threads,
            rates=device.rates,
            streamed=1.0,
            lone_products=False,
            layouts=device.layouts,
            follows=not self.numerics.strict,
            scatters=frozenset(SCATTER_OPS),
        )

    def prepare(self) -> None:
        """Do nothing: there is nothing to prepare."""

    def lacking(self) -> str:
        """Return why built kernels cannot be kept for later processes, if that is so."""
        return f"built kernels are not kept: {self._unkept}" if self._unkept else ""

    def emit(self, kernel: Kernel) -> str:
        """Return the C source of `kernel`.

        Raises:
            BuildError: the kernel cannot be written in C.
        """
        return emit_kernel(kernel)

    def refuses(self, kernel: Kernel) -> str:
        """Return nothing: all kernels are accepted."""
        return ""

    def alternatives(self, kernel: Kernel) -> Sequence[Alternative]:
        """Return one: the C compiler makes the remaining choices."""
        return (Alternative("default", self.emit(kernel)),)

    def efficiency(self, kernel: Kernel) -> float:
        """Return a high efficiency for several folds in one kernel; a single product is better left to the library."""
        folds = list(statements(kernel.body, Fold))
        return SEVERAL_FOLDS if len(folds) > 1 else ONE_FOLD

    def waits(self, kernel: Kernel) -> bool:
        """Return False: epilogue time does not add to GEMM time."""
        return False

    def forms(self, kernel: Kernel) -> tuple[Form, ...]:
        """Return the only form."""
        return (Form(GENERATED),)

    def chained_share(self, chain: Chain, name: str = "") -> float:
        """Return the efficiency of chained products, relative to the library's GEMMs."""
        return fastest(self.device.attention, (name or GENERATED,), chain)

    def packs(self, first: Kernel, second: Kernel) -> bool:
        """Return True: the kernels run one after the other, in one call."""
        return True

    def finishes(self, kernel: Kernel, axis: sympy.Symbol) -> bool:
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

    def stages(self, kernel: Kernel, source: str) -> Iterator[Stage]:
        """Yield the assembly text.

        Raises:
            BuildError: no compiler, or the compiler's message.
        """
        yield "s", assembly(source)


__all__ = ["CTarget"]
