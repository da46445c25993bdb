"""The reference target: a Kernel is not compiled but evaluated, statement by statement, in torch.

Input: a verified Kernel; output: a launcher that gives the values every other target must give, on any device, and that
refuses accesses outside of a tensor.  The source is the Kernel's own text; it is for reading, and an edited one is
refused.  For tests, for checking configurations, and where no compiler is present.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy
import torch

from fusion.codegen.attention import GENERATED
from fusion.codegen.numerics import DEFAULT, Numerics
from fusion.codegen.target import Alternative, Capabilities, Form, Launcher, Stage
from fusion.lowering.errors import BuildError
from fusion.lowering.interpret import run_kernel
from fusion.lowering.kernel import Kernel
from fusion.lowering.printer import format_kernel
from fusion.lowering.program import SCATTER_OPS
from fusion.lowering.scalar_ops import FOLD_OPS
from fusion.lowering.verify import verify_kernel


class ReferenceTarget:
    """Runs the evaluator.  It can do everything the IR can say; its prices are those of any machine, not of torch.

    >>> ReferenceTarget().capabilities.fold_ops >= {"dot", "argmax"}
    True
    """

    name = "reference"
    suffix = "txt"

    def __init__(self, numerics: Numerics = DEFAULT) -> None:
        self.numerics = numerics

    @property
    def identity(self) -> str:
        """Any machine."""
        return ""

    @property
    def capabilities(self) -> Capabilities:
        """All operations, with the prices of a small many-core device, so that it schedules as such a device would."""
        return Capabilities(
            fold_ops=frozenset(FOLD_OPS),
            whole_limit=1 << 15,
            window_limit=25,
            parallelism=128,
            launch_us=5.0,
            bandwidth=1e6,
            flops=2e7,
            matrix_flops=2e8,
            streamed=1.0,
            follows=not self.numerics.strict,
            scatters=frozenset(SCATTER_OPS),
            ordered=False,
        )

    def prepare(self) -> None:
        """Nothing."""

    def lacking(self) -> str:
        """Nothing."""
        return ""

    def emit(self, kernel: Kernel) -> str:
        """The text form of `kernel`."""
        return format_kernel(kernel)

    def refuses(self, kernel: Kernel) -> str:
        """Nothing."""
        return ""

    def alternatives(self, kernel: Kernel) -> Sequence[Alternative]:
        """One: the evaluator."""
        return (Alternative("default", self.emit(kernel)),)

    def efficiency(self, kernel: Kernel) -> float:
        """As fast as any library, so that schedules show what can be fused."""
        return 1.0

    def waits(self, kernel: Kernel) -> bool:
        """No."""
        return False

    def forms(self, kernel: Kernel) -> tuple[Form, ...]:
        """One."""
        return (Form(GENERATED),)

    def packs(self, first: Kernel, second: Kernel) -> bool:
        """Any two, so that schedules show what is independent."""
        return True

    def finishes(self, kernel: Kernel, axis: sympy.Symbol) -> bool:
        """Along any axis, so that schedules show what could follow in a launch."""
        return True

    def build(self, kernel: Kernel, source: str) -> Launcher:
        """What runs `kernel` on its tensors, then its sizes.

        Raises:
            BuildError: `source` is not the text of `kernel`; only the Kernel itself can be run.
            VerifyError: the kernel is not well formed.
        """
        if source != self.emit(kernel):
            raise BuildError(
                f"kernel {kernel.name}: the reference target runs kernels, not their text",
                hint="to run an edited kernel, choose the target c or triton",
            )
        verify_kernel(kernel)
        count = len(kernel.params)

        def launch(*args: torch.Tensor | int) -> None:
            tensors = [arg for arg in args[:count] if isinstance(arg, torch.Tensor)]
            run_kernel(kernel, tensors, [int(size) for size in args[count:]])

        return launch

    def stages(self, kernel: Kernel, source: str) -> Iterator[Stage]:
        """Nothing comes after the source."""
        return iter(())


__all__ = ["ReferenceTarget"]
