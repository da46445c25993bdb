"""From a cluster to a Kernel: axes get roles, folds and stores loops, and everything canonical names.

Two clusters that compute the same give equal Kernels, whatever the names of their buffers.

    axes.py      axes: merged, in memory order, `i0, i1, …` and `r0, r1, …`; their role
    bodies.py    statements: as few loops over the reduced axes as possible
    streamed.py  the same for tiles that the kernel computes and loops over
    finish.py    parameters and names
"""

from __future__ import annotations

from fusion.schedule.kernels.build import kernel_of
from fusion.schedule.kernels.finish import KernelCall

__all__ = ["KernelCall", "kernel_of"]
