"""Serialises the kernels whose IR an artifact needs in addition to their binaries.

The IR of a kernel with checks identifies the check that failed, and its source line; some targets need the IR to launch
the binary.  Input: a kernel; output: text; in another process: the kernel from its text, or the error of a failed
launch.
"""

from __future__ import annotations

from fusion.codegen.binary import Arguments
from fusion.graph_cache import KINDS
from fusion.graph_cache.serialise import Unwritten, read, write
from fusion.lowering.checks.checked import failure, has_checks
from fusion.lowering.errors import CheckFailed, Unsupported
from fusion.lowering.ir.kernel import Kernel


def checked_text(kernel: Kernel) -> str:
    """Return a kernel as text; empty for a kernel without checks.

    Raises:
        Unsupported: it cannot be written.
    """
    return text_of(kernel) if has_checks(kernel) else ""


def text_of(kernel: Kernel) -> str:
    """Return a kernel as text.

    Raises:
        Unsupported: it cannot be written.
    """
    try:
        return write(kernel, KINDS)
    except Unwritten as refusal:
        raise Unsupported(f"kernel {kernel.name} is not saved: it holds {refusal}") from refusal


def failure_of(text: str, args: Arguments) -> CheckFailed:
    """Return the error of the check that failed in a launch on `args`."""
    return failure(kernel_of(text), args)


def kernel_of(text: str) -> Kernel:
    """Return the kernel that a text describes.

    Raises:
        ValueError: it describes none.
    """
    kernel = read(text, KINDS)
    if not isinstance(kernel, Kernel):
        raise ValueError("it describes no kernel")
    return kernel


__all__ = ["checked_text", "failure_of", "kernel_of", "text_of"]
