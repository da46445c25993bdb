"""The protocol of a target, for Triton."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from codegen.target import Capabilities, Launcher, Stage
from codegen.triton.blocks import block
from codegen.triton.configs import Config
from codegen.triton.efficiency import efficiency
from codegen.triton.emit import candidates, emit
from codegen.triton.load import POINTERS
from codegen.triton.spell import SPELLING
from lowering.kernel import Kernel
from lowering.scalar_ops import FOLD_OPS

_H200 = Capabilities(
    dtypes=frozenset(POINTERS),
    scalar_ops=frozenset({*SPELLING, "where"}),
    fold_ops=frozenset(FOLD_OPS),
    whole_limit=65_536,  # elements of a row: 64 per thread of 32 warps, still better than reading it again
    parallelism=2 * 132,  # two programs per multiprocessor
    launch_us=4.0,
    bandwidth=4.3e6,  # a copy, both directions together
    flops=6.7e7,  # float32, outside the matrix units
    matrix_flops=7.5e8,  # bfloat16
)


class TritonTarget:
    """Kernels as Triton source.

    Args:
        arch: what to generate for, such as "sm_90", "sm_80" or "gfx942"; by default the current device, or "sm_90"
            where there is none.
        allow_tf32: float32 contractions may round their operands to 19 bits, as
            `torch.backends.cuda.matmul.allow_tf32` permits.
    """

    name = "triton"

    def __init__(self, arch: str | None = None, *, allow_tf32: bool = False) -> None:
        self._arch, self.allow_tf32 = arch, allow_tf32

    @property
    def arch(self) -> str:
        """The architecture that source is generated for."""
        if self._arch is not None:
            return self._arch
        if not torch.cuda.is_available():
            return "sm_90"
        if torch.version.hip is not None:
            name: str = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName
            return name.partition(":")[0]
        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}"

    @property
    def capabilities(self) -> Capabilities:
        """What can be generated, and what it costs on an H200."""
        return _H200

    def emit(self, kernel: Kernel, config: Config | None = None) -> str:
        """The source of `kernel`, in `config` or in the default configuration."""
        return emit(kernel, config, arch=self.arch, tf32=self.allow_tf32)

    def configs(self, kernel: Kernel) -> tuple[Config, ...]:
        """Configurations worth timing for `kernel`, the default first."""
        return candidates(block(kernel), self.arch, tf32=self.allow_tf32)

    def efficiency(self, kernel: Kernel) -> float:
        """The share of cuBLAS's speed that a contraction reaches, as measured on an H200."""
        return efficiency(block(kernel), self.arch)

    def build(self, kernel: Kernel, source: str) -> Launcher:
        """Compile `source` for the current device and return what launches it.  Thread-safe.

        Under `TRITON_INTERPRET=1` nothing is compiled, and the launcher takes CPU tensors.

        Raises:
            BuildError: with Triton's own message, or where there is no device.
        """
        from codegen.triton.build import build

        return build(kernel, source, self.emit)

    def stages(self, kernel: Kernel, source: str, arch: str | None = None) -> Iterator[Stage]:
        """TTIR, TTGIR, LLVM IR, then PTX and cubin, or AMD assembly and code object.  Needs no device.

        Raises:
            BuildError: Triton cannot compile `source` for `arch`.
        """
        from codegen.triton.aot import stages

        return stages(kernel, source, arch or self.arch)
