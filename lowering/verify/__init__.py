"""The verifier: is a Program or a Kernel well formed?

Input: a Program or a Kernel; nothing leaves.  What breaks a rule of its IR is refused with `VerifyError`, which names
the node and the rule: that is a defect of the compiler, found next to the pass that made it.  Only what is certain is
refused; an index is out of bounds only if some point of the iteration space is known to be.
"""

from __future__ import annotations

from fusion.lowering.verify.kernels import verify_kernel
from fusion.lowering.verify.programs import Verified, verify_program

__all__ = ["Verified", "verify_kernel", "verify_program"]
