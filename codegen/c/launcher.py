"""Turns a kernel and its C text into a launcher, or into an object for another process."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial

from fusion.codegen.binary import Binary, Callee
from fusion.codegen.c.build import build_object
from fusion.codegen.c.calls import launcher_of
from fusion.codegen.c.processor import required_by
from fusion.codegen.c.text.nest import identifier
from fusion.codegen.target import Launcher
from fusion.lowering.checks.checked import failure
from fusion.lowering.ir.kernel import Kernel


def build_kernel(kernel: Kernel, source: str, unkept: Callable[[str], object] = lambda reason: None) -> Launcher:
    """Load the object compiled from `source`, or compile it, and return its launcher.

    Args:
        unkept: is called with the reason why the object cannot be kept for later processes.

    Raises:
        BuildError: no compiler, the compiler's message, or the loader's.
    """
    loaded = partial(launcher_of, callee=callee_of(kernel), failed=partial(failure, kernel), source=source)
    return build_object(source, kernel.name, loaded, unkept)


def binary_of(kernel: Kernel, source: str, arch: str) -> Binary:
    """Return the object of a kernel for `arch` (`processor.py`).

    Raises:
        Unsupported: nothing can be compiled for `arch` here.
        BuildError: no compiler, or its message.
    """
    needs = (platform.machine(), platform.system(), *sorted(required_by(arch)))
    content = build_object(source, kernel.name, bytes, arch=arch)
    return Binary(callee_of(kernel), "so", content, needs)


def callee_of(kernel: Kernel) -> Callee:
    """Return how a kernel's function is called."""
    return Callee(kernel.name, identifier(kernel.name), len(kernel.params), len(kernel.sizes))
