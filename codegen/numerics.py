"""Numerics: how exactly generated arithmetic follows eager's, as far as a target decides it.

Input: what the user asked for and what PyTorch is set to; output: a value that is part of a target, so that kernels for
one are never taken for another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Numerics:
    """What a target may do to the last bits.

    Attributes:
        strict: nothing: no multiplication is fused with an addition, no quick form of the hardware is used, and sums
            are not brought from one running value to another.
        tf32: products of float32 may round their operands to 19 bits.
    """

    strict: bool = False
    tf32: bool = False


DEFAULT = Numerics()


def current(*, strict: bool) -> Numerics:
    """The numerics of a compilation that begins now.

    Products of float32 are as PyTorch is set to compute its own on a GPU: `torch.set_float32_matmul_precision`,
    `torch.backends.cuda.matmul.allow_tf32` and `.fp32_precision` are names of one setting.  Dynamo guards it: after a
    change it compiles again.
    """
    return Numerics(strict, torch.backends.cuda.matmul.fp32_precision == "tf32")
