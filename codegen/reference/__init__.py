"""Evaluates a Kernel statement by statement in torch, without compiling it: the reference target.

Input: a verified Kernel; output: a launcher that returns the values every other target must return, on any device, and
that refuses out-of-bounds accesses.  The source is the Kernel's text; it is for reading, and an edited one is refused.
For tests, for checking configurations, and where there is no compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from fusion.codegen.binary import Binary
from fusion.codegen.build import evaluated
from fusion.codegen.chained import GENERATED, ChainShape, fastest
from fusion.codegen.numerics import DEFAULT, Numerics
from fusion.codegen.price import Rates
from fusion.codegen.target import Capabilities, ChainedForm, KernelCandidate, Launcher, ProductTiles, Stage
from fusion.lowering.errors import BuildError, Unsupported
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import SCATTER_OPS
from fusion.lowering.ir.scalar_ops import FOLD_OPS
from fusion.lowering.printer import format_kernel
from fusion.lowering.verify import verify_kernel


class ReferenceTarget:
    """Runs the evaluator.  It supports all of the IR; its costs describe a generic device, not torch.

    >>> ReferenceTarget().capabilities.fold_ops >= {"dot", "argmax"}
    True
    """

    name = "reference"
    suffix = "txt"

    def __init__(self, numerics: Numerics = DEFAULT) -> None:
        self.numerics = numerics

    @property
    def identity(self) -> str:
        """The empty text: results do not depend on the machine."""
        return ""

    @property
    def capabilities(self) -> Capabilities:
        """All operations, with the costs of a small many-core device, so that it schedules as such a device would."""
        return Capabilities(
            fold_ops=frozenset(FOLD_OPS),
            whole_limit=1 << 15,
            window_limit=25,
            parallelism=128,
            rates=Rates(launch_us=5.0, bandwidth=1e6, flops=2e7, matrix_flops=2e8),
            tiles=ProductTiles(128, 256, least_columns=64, together=0.8, side=128, halved=(128, 64)),
            chained=1.0,
            follows=not self.numerics.strict,
            scatters=frozenset(SCATTER_OPS),
            ordered=False,
        )

    def prepare(self) -> None:
        """Do nothing: the evaluator needs no preparation."""

    def missing_tools(self) -> str:
        """Return an empty reason: the evaluator always runs."""
        return ""

    def emit(self, kernel: Kernel) -> str:
        """Return the text form of `kernel`."""
        return format_kernel(kernel)

    def refuses(self, kernel: Kernel) -> str:
        """Return an empty reason: all kernels are accepted."""
        return ""

    def alternatives(self, kernel: Kernel) -> Sequence[KernelCandidate]:
        """Return the only alternative, which evaluates the kernel."""
        return (KernelCandidate("default", self.emit(kernel)),)

    def efficiency(self, kernel: Kernel) -> float:
        """Return 1, the library's own speed, so that no fusion is refused for it."""
        return 1.0

    def exposes_epilogue(self, kernel: Kernel) -> bool:
        """Return False: epilogue time does not add to GEMM time."""
        return False

    def forms(self, kernel: Kernel) -> tuple[ChainedForm, ...]:
        """Return the only form."""
        return (ChainedForm(GENERATED),)

    def chained_share(self, chain: ChainShape, name: str = "") -> float:
        """Raise: no speed of chained products is known."""
        return fastest({}, (name or GENERATED,), chain)

    def can_share_launch(self, first: Kernel, second: Kernel) -> bool:
        """Return True, so that schedules show independent kernels in one launch."""
        return True

    def can_reduce_in_last_block(self, kernel: Kernel, axis: sympy.Symbol) -> bool:
        """Return True along any axis, so that schedules show all kernels that could follow in a launch."""
        return True

    def build(self, kernel: Kernel, source: str) -> Launcher:
        """Return a launcher that evaluates `kernel` on its tensors and sizes.

        Raises:
            BuildError: `source` is not the text of `kernel`; only the Kernel itself can be run.
            VerifyError: the kernel is malformed.
        """
        if source != self.emit(kernel):
            raise BuildError(
                f"kernel {kernel.name}: the reference target runs kernels, not their text",
                hint="to run an edited kernel, choose the target c or triton",
            )
        verify_kernel(kernel)
        return evaluated(kernel)

    def binary(self, kernel: Kernel, source: str, arch: str | None = None) -> Binary:
        """Raise: kernels are evaluated, not compiled.

        Raises:
            Unsupported: always.
        """
        raise Unsupported("the reference target evaluates kernels, and has no binaries", hint="choose the target c")

    def stages(self, kernel: Kernel, source: str) -> Iterator[Stage]:
        """Return nothing: there are no artefacts after the source."""
        return iter(())


__all__ = ["ReferenceTarget"]
