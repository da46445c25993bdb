"""Keeps kernels whose launch may fail because of their data: only they tell which check has failed, and where.

Input: a kernel; output: text; and from the text, in another process, the error of a launch that failed.
"""

from __future__ import annotations

from fusion.codegen.binary import Arguments
from fusion.graph_cache import KINDS
from fusion.graph_cache.form import Unwritten, read, write
from fusion.lowering.checks import failure, has_checks
from fusion.lowering.errors import CheckFailed, Unsupported
from fusion.lowering.kernel import Kernel


def checked_text(kernel: Kernel) -> str:
    """Return a kernel as text; nothing for one without checks.

    Raises:
        Unsupported: it cannot be written.
    """
    if not has_checks(kernel):
        return ""
    try:
        return write(kernel, KINDS)
    except Unwritten as refusal:
        raise Unsupported(f"kernel {kernel.name} is not saved: it holds {refusal}") from refusal


def failure_of(text: str, args: Arguments) -> CheckFailed:
    """Return the error to raise after a launch on `args` in which a check of the kernel failed."""
    kernel = read(text, KINDS)
    assert isinstance(kernel, Kernel)
    return failure(kernel, args)


__all__ = ["checked_text", "failure_of"]
