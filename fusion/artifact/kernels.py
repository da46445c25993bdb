"""Stores the kernels that an artifact needs as kernels, not only as binaries.

A kernel whose launch may fail because of its data is needed to report which check failed, and where; a target may need
a kernel to launch its binary.  Input: a kernel; output: text; and from the text, in another process, the kernel, or the
error of a launch that failed.
"""

from __future__ import annotations

from fusion.codegen.binary import Arguments
from fusion.graph_cache import KINDS
from fusion.graph_cache.serialise import Unwritten, read, write
from fusion.lowering.checks.checked import failure, has_checks
from fusion.lowering.errors import CheckFailed, Unsupported
from fusion.lowering.ir.kernel import Kernel


def checked_text(kernel: Kernel) -> str:
    """Return a kernel as text; nothing for one without checks.

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
    """Return the error to raise after a launch on `args` in which a check of the kernel failed."""
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
