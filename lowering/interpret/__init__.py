"""The reference evaluator: what a Program and a Kernel mean.

Input: a Program or a Kernel with real tensors; output: the values that every target must give.  Large spaces are walked
in boxes that keep temporaries bounded.  It is also a bounds checker: reading or writing outside a tensor, an argument
that is not as declared, or a value of another dtype than stated raises `VerifyError`.

With `exact=False` all floating-point values are float64 and conversions between float types do nothing: the yardstick
that rounding errors are measured against.
"""

from __future__ import annotations

from fusion.lowering.interpret.kernels import run_kernel
from fusion.lowering.interpret.programs import run_program

__all__ = ["run_kernel", "run_program"]
