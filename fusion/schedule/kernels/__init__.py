"""From a cluster to a Kernel: axes get their roles, folds and stores their loops, and everything its canonical name.

Two clusters that compute the same give equal Kernels, however their buffers were called.

    settle.py    axes: merged, in the order of memory, `i0, i1, …` and `r0, r1, …`; their role
    bodies.py    statements: as few walks of the reduced axes as will do
    streamed.py  the same for tiles that are walked where they are made
    finish.py    parameters and names
"""

from __future__ import annotations

from fusion.schedule.kernels.build import kernel_of
from fusion.schedule.kernels.finish import KernelCall

__all__ = ["KernelCall", "kernel_of"]
