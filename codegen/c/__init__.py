"""The C target: kernels for CPU tensors as plain C, built by the system's compiler.

Input: a Kernel; output: one C function, threads over its grid axes and SIMD lanes over the innermost, and a launcher
for it.  Contractions are written tile by tile (`blocked`), but not announced: alone, or with what is merely
element-wise around them, they are left to the library, whose calls take a bias along.

kernel → forms → walks → loops     `text` is what each of them writes with
               → walks → blocked   where there are products, running values
text   → frame → build → launcher

`forms.py` lists the ways to write a kernel; `loops/function.py` and `blocked/function.py` are the paths of a kernel to
its text; each other file decides one thing on them, and each package says which things.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from fusion.codegen.attention import GENERATED
from fusion.codegen.c.build import assembly, build_kernel, cpu_identity
from fusion.codegen.c.device import Cpu, present
from fusion.codegen.c.emit import emit_kernel
from fusion.codegen.numerics import DEFAULT, Numerics
from fusion.codegen.target import Alternative, Capabilities, Form, Launcher, Stage
from fusion.lowering.kernel import Fold, Kernel, statements
from fusion.lowering.program import SCATTER_OPS
from fusion.lowering.scalar_ops import FOLD_OPS

ONE_FOLD, SEVERAL_FOLDS = 0.05, 0.6
"""Shares of a library's speed: so low that it keeps every single product; and what is left of it beside other folds."""


class CTarget:
    """Runs kernels on the CPU (see `fusion.codegen.target.Target`)."""

    name = "c"
    suffix = "c"

    def __init__(self, numerics: Numerics = DEFAULT) -> None:
        self.numerics = numerics

    @property
    def device(self) -> Cpu:
        """The CPU, with as many threads as PyTorch uses of it now."""
        return present()

    @property
    def identity(self) -> str:
        """The CPU with its features."""
        return cpu_identity()

    @property
    def capabilities(self) -> Capabilities:
        """What can be written in C, and what it costs on the threads that PyTorch uses."""
        device = self.device
        return Capabilities(
            fold_ops=frozenset(FOLD_OPS),
            whole_limit=1 << 18,
            window_limit=1,
            parallelism=device.threads,
            launch_us=device.launch_us,
            bandwidth=device.bandwidth,
            flops=device.flops,
            matrix_flops=device.matrix_flops,
            matrix_share=device.matrix_share,
            streamed=1.0,
            lone_products=False,
            attention=device.attention,
            layouts=device.layouts,
            follows=not self.numerics.strict,
            scatters=frozenset(SCATTER_OPS),
        )

    def prepare(self) -> None:
        """Nothing."""

    def lacking(self) -> str:
        """Nothing."""
        return ""

    def emit(self, kernel: Kernel) -> str:
        """C source of `kernel`.

        Raises:
            BuildError: the kernel cannot be written in C.
        """
        return emit_kernel(kernel)

    def refuses(self, kernel: Kernel) -> str:
        """Nothing."""
        return ""

    def alternatives(self, kernel: Kernel) -> Sequence[Alternative]:
        """One: the compiler chooses what there is to choose."""
        return (Alternative("default", self.emit(kernel)),)

    def efficiency(self, kernel: Kernel) -> float:
        """Several folds in one kernel pay for themselves; a product alone is what the library is for."""
        found = list(statements(kernel.body, Fold))
        return SEVERAL_FOLDS if len(found) > 1 else ONE_FOLD

    def waits(self, kernel: Kernel) -> bool:
        """No."""
        return False

    def forms(self, kernel: Kernel) -> tuple[Form, ...]:
        """One."""
        return (Form(GENERATED),)

    def packs(self, first: Kernel, second: Kernel) -> bool:
        """Any two: they run one after the other, in one call."""
        return True

    def finishes(self, kernel: Kernel, axis: sympy.Symbol) -> bool:
        """No: another loop over what has been made costs no launch."""
        return False

    def build(self, kernel: Kernel, source: str) -> Launcher:
        """Compile and load `source`; thread-safe.

        Raises:
            BuildError: no compiler, or the compiler's message.
        """
        return build_kernel(kernel, source)

    def stages(self, kernel: Kernel, source: str) -> Iterator[Stage]:
        """The assembly text.

        Raises:
            BuildError: no compiler, or the compiler's message.
        """
        yield "s", assembly(source)


__all__ = ["CTarget"]
