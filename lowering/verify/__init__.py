"""Verifies Programs and Kernels.

Input: a Program or a Kernel; no output.  A violated rule of its IR raises `VerifyError` with the node and the rule: a
defect of the compiler, detected next to the pass that caused it.  Only certain violations are refused; an index is out
of bounds only if it certainly is at some point of the iteration space.
"""

from __future__ import annotations

from fusion.lowering.verify.kernels import verify_kernel
from fusion.lowering.verify.programs import Verified, verify_program

__all__ = ["Verified", "verify_kernel", "verify_program"]
