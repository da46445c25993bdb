"""Evaluates Programs and Kernels: the reference evaluator defines their meaning.

Input: a Program or a Kernel with real tensors; output: the values that every target must give.  Large iteration spaces
are evaluated in boxes that bound temporaries.  It also checks bounds: a read or write outside a tensor, an argument
that differs from its declaration, or a value of another dtype than stated raises `VerifyError`.

With `exact=False` all floating-point values are float64 and conversions between float types do nothing: the reference
for rounding errors.
"""

from __future__ import annotations

from fusion.lowering.interpret.kernels import run_kernel
from fusion.lowering.interpret.programs import run_program

__all__ = ["run_kernel", "run_program"]
