"""Redirection of stores: a result is written to the memory of another parameter.

Input: a kernel and two of its parameters; output: the kernel without the first, whose stores go to the second.  The
caller decides whether that overwrites data that is still needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion.lowering.kernel import Kernel, Param, rename


def redirected(kernel: Kernel, new: str, old: str) -> Kernel:
    """Return the kernel that writes to the parameter `old` instead of `new`, and does not take `new`."""
    names = {param.name: old if param.name == new else param.name for param in kernel.params}
    return replace(kernel, params=params_without(kernel.params, new, old), body=rename(kernel.body, names))


def params_without(params: Sequence[Param], new: str, old: str) -> tuple[Param, ...]:
    """Return the parameters of a launch that writes `old` in place of `new`."""
    return tuple(replace(p, written=p.written or p.name == old) for p in params if p.name != new)


__all__ = ["params_without", "redirected"]
