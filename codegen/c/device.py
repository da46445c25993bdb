"""Describes a CPU: the throughput of its cores and its memory.

All CPUs are assumed equal to the measured one, with as many threads as PyTorch uses; the C compiler targets the
machine's own instructions (`build.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from fusion.codegen.chained import GENERATED, ChainSpeed
from fusion.codegen.price import Rates
from fusion.codegen.target import Layouts


@dataclass(frozen=True, slots=True)
class Cpu:
    """A CPU.

    Attributes:
        threads: that run kernels, one per core.
        launch_us: microseconds of one launch.
        core_bandwidth: bytes per microsecond to memory, of one core.
        memory_cores: the number of cores that saturate memory.
        core_flops: float32 operations per microsecond of one core, in vectorised loops.
        core_matrix_flops: the same in the library's GEMMs.
        matrix_share: bytes of an operand's element → the relative rate of the library's GEMMs.
        attention: (form, or kernel of the library, bytes of an element) → its speed.
        layouts: the costs of other tensor layouts.

    >>> replace(EPYC, threads=4).rates.flops / EPYC.rates.flops
    4.0
    """

    name: str
    threads: int
    launch_us: float
    core_bandwidth: float
    memory_cores: int
    core_flops: float
    core_matrix_flops: float
    matrix_share: Mapping[int, float] = field(hash=False)
    attention: Mapping[tuple[str, int], ChainSpeed] = field(hash=False)
    layouts: Layouts

    @property
    def rates(self) -> Rates:
        """What the threads do together in a microsecond."""
        return Rates(
            launch_us=self.launch_us,
            bandwidth=self.core_bandwidth * min(self.threads, self.memory_cores),
            flops=self.core_flops * self.threads,
            matrix_flops=self.core_matrix_flops * self.threads,
            matrix_share=self.matrix_share,
        )


EPYC = Cpu(
    name="AMD EPYC",  # a core of one, torch 2.13
    threads=1,
    launch_us=2.0,
    core_bandwidth=20_000.0,
    memory_cores=10,
    core_flops=20_000.0,
    core_matrix_flops=100_000.0,
    matrix_share={1: 0.5, 2: 1.0, 4: 1.0, 8: 0.5},
    # 8 heads of 2048 rows, 64 wide; skipping is between a causal mask (1.4) and a window of 256 (0.7).  Generated
    # backward consists of GEMMs of the library, not of attention in one loop: it is refused whatever its
    # number is here.
    attention={
        ("flash", 4): ChainSpeed(plain={64: (0.75, 0.71)}, skipping={64: (0.60, 0.60)}, masked={64: (0.60, 0.62)}),
        ("flash", 2): ChainSpeed(plain={64: (0.74, 1.28)}, skipping={64: (0.60, 0.80)}, masked={64: (0.60, 1.10)}),
        (GENERATED, 4): ChainSpeed(plain={64: (1.4, 0.5)}, skipping={64: (1.0, 0.5)}, masked={64: (1.1, 0.5)}),
        (GENERATED, 2): ChainSpeed(plain={64: (1.5, 0.5)}, skipping={64: (1.0, 0.5)}, masked={64: (1.2, 0.5)}),
    },
    layouts=Layouts(begins=8e6, multiplication=(1.5, 8.0)),  # an H200's: not measured
)


def present() -> Cpu:
    """Return the CPU of this machine, with the threads that PyTorch uses."""
    return replace(EPYC, threads=torch.get_num_threads())
