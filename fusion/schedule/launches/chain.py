"""Chaining: a kernel of one program that only finishes another joins its launch.

The sum of a row-wise loss, the second stage of a reduction over everything, a norm of norms: each would be a launch
of its own for a handful of numbers.  Run by the last program of the kernel that feeds it, it costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fusion.schedule.kernels import KernelCall
from fusion.schedule.launches.launch import share
from lowering.kernel import Kernel, Role
from lowering.program import Extern, writes

SMALL = 1 << 14
"""Points above which one program alone would take longer than a launch."""


def chain_last_steps(steps: Sequence[KernelCall | Extern]) -> list[KernelCall | Extern]:
    """The steps with single-program kernels moved into the launch of the kernel that they follow."""
    result: list[KernelCall | Extern] = []
    ready: dict[str, int] = {}  # buffer → position in result of the step that makes it
    for step in steps:
        position = _host(result, ready, step) if isinstance(step, KernelCall) else None
        if position is None:
            result.append(step)
            position = len(result) - 1
        else:
            host = result[position]
            assert isinstance(host, KernelCall) and isinstance(step, KernelCall)
            result[position] = _chained(host, step)
        for name in (*step.written, *step.over) if isinstance(step, KernelCall) else writes(step):
            ready[name] = position
    return result


def _host(result: Sequence[KernelCall | Extern], ready: dict[str, int], step: KernelCall) -> int | None:
    """The latest step that `step` depends on, if `step` may run at its end."""
    sizes = [axis.size for axis in step.kernel.axes]
    single = not step.kernel.with_role(Role.GRID) and all(size.is_Integer for size in sizes)
    if not single or math.prod(map(int, sizes)) > SMALL or step.kernel.sizes:
        return None
    inputs = [name for name in step.buffers if name not in step.written]
    position = max((ready[name] for name in inputs if name in ready), default=-1)
    host = result[position] if position >= 0 else None
    if not isinstance(host, KernelCall) or not all(axis.size.is_Integer and axis.size > 0 for axis in host.kernel.axes):
        return None  # an empty grid has no last program
    if host.kernel.awaited:  # each tile has a last program of its own
        return None
    if host.over.keys() & {*inputs}:  # written in the memory of a tensor that has another name in this launch
        return None
    return position


def _chained(host: KernelCall, last: KernelCall) -> KernelCall:
    call, tail = share(host, last)
    name = f"{host.kernel.name}_{last.kernel.name}"
    return replace(call, kernel=replace(call.kernel, name=name, then=_append(host.kernel.then, tail)))


def _append(chain: Kernel | None, tail: Kernel) -> Kernel:
    if chain is None:
        return tail
    return replace(chain, then=_append(chain.then, tail))
