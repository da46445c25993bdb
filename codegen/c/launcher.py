"""Turns a kernel and its C text into a launcher."""

from __future__ import annotations

from collections.abc import Callable

from fusion.codegen.c.build import build_object
from fusion.codegen.c.calls import NO_MEMORY, Arguments, launcher_of
from fusion.codegen.c.text.nest import identifier
from fusion.codegen.target import Launcher
from fusion.lowering.checks import failure
from fusion.lowering.errors import FusionError, OutOfMemory
from fusion.lowering.kernel import Kernel


def build_kernel(kernel: Kernel, source: str, unkept: Callable[[str], object] = lambda reason: None) -> Launcher:
    """Load what was compiled from `source`, or compile it, and return its launcher.

    Args:
        unkept: is called with the reason why the object cannot be kept for later processes.

    Raises:
        BuildError: no compiler, the compiler's message, or the loader's.
    """

    def loaded(binary: bytes) -> Launcher:
        return launcher_of(binary, identifier(kernel.name), len(kernel.params), len(kernel.sizes), error)

    def error(result: int, args: Arguments) -> FusionError:
        if result & NO_MEMORY:
            return OutOfMemory(f"there is no memory for the scratch arrays of kernel {kernel.name}")
        return failure(kernel, args)

    return build_object(source, kernel.name, loaded, unkept)
