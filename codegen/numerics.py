"""Defines numerics: how exactly generated arithmetic follows eager's, as far as a target decides it.

Input: the options and PyTorch's settings; output: a value that is part of a target, so that kernels of different
numerics have different cache keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Numerics:
    """Permitted deviations in the last bits.

    Attributes:
        strict: none: no multiplication is fused with an addition, no approximation of the hardware is used, and sums
            are not rescaled from one running value to another.
        tf32: GEMMs of float32 may round their operands to 19 bits.
        invariant: the order of additions in a row depends neither on the number of rows nor on the parallelism of the
            device.
    """

    strict: bool = False
    tf32: bool = False
    invariant: bool = False


DEFAULT = Numerics()


def current(*, strict: bool, invariant: bool = False) -> Numerics:
    """Return the numerics of a compilation that starts now.

    GEMMs of float32 follow PyTorch's setting for its own on a GPU: `torch.set_float32_matmul_precision`,
    `torch.backends.cuda.matmul.allow_tf32` and `.fp32_precision` are names of one setting.  Dynamo guards it: after a
    change it compiles again.
    """
    return Numerics(strict, torch.backends.cuda.matmul.fp32_precision == "tf32", invariant)
