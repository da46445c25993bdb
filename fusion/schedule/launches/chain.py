"""Chains a kernel of one program, which only finishes another one, to that one's launch.

The sum of a row-wise loss, the second stage of a reduction over everything, a norm of norms: each would be a separate
launch for a few numbers.  Run by the last program of the kernel before, it costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from fusion.codegen.target import Capabilities, ProductTiles
from fusion.lowering.ir.kernel import Fold, Kernel, Role, statements
from fusion.lowering.ir.program import Call
from fusion.lowering.ir.sizes import estimate
from fusion.schedule.iteration.naming import limited
from fusion.schedule.kernels import KernelCall
from fusion.schedule.launches.launch import join_earlier, share

_BLOCK = 1024
"""Elements of a row above which a program computes one row."""

MOST_CHAINED_POINTS = 1 << 14
"""Points above which a single program would take longer than a launch."""


def chain_last_steps(
    steps: Sequence[KernelCall | Call], capabilities: Capabilities | None = None
) -> list[KernelCall | Call]:
    """Move single-program kernels into the launch of the kernel that they follow.

    Args:
        capabilities: limit the programs of a launch that another kernel follows (`most_followed`).

    >>> from fusion.inspect.examples import show_launches
    >>> from torch import empty
    >>> def f(x):
    ...     return x.exp().sum(-1).sin().sum()
    >>> show_launches(lambda steps, program: chain_last_steps(steps), f, empty(300, 70))
    - launch exp_sum_sin(x, sin)
    + launch exp_sum_sin_sum(x, sin, sum_2)
    - launch sum(sin, sum_2)
    """
    return join_earlier(steps, partial(_chained, capabilities=capabilities))


def _chained(
    steps: Sequence[KernelCall | Call], maker: Mapping[str, int], last: KernelCall, *, capabilities: Capabilities | None
) -> tuple[int, KernelCall] | None:
    """Return the latest step that `last` depends on, with `last` appended; None if it may not run there."""
    position = _host(steps, maker, last)
    if position is None:
        return None
    host = steps[position]
    assert isinstance(host, KernelCall)
    if capabilities is not None and 0 < capabilities.most_followed < _programs(host.kernel, capabilities.tiles):
        return None
    call, tail = share(host, last)
    name = limited(f"{host.kernel.name}_{last.kernel.name}")
    return position, replace(call, kernel=replace(call.kernel, name=name, then=_append(host.kernel.then, tail)))


def _programs(kernel: Kernel, tiles: ProductTiles) -> int:
    """Return about how many programs compute a kernel: each a tile of a product, a row, or `_BLOCK` elements."""
    sizes = {role: math.prod(estimate(axis.size, {}) for axis in kernel.with_role(role)) for role in Role}
    rows, length = sizes[Role.GRID], sizes[Role.WHOLE] * sizes[Role.LOOP]
    if any(fold.op == "dot" for fold in statements(kernel.body, Fold)):
        return -(-rows // tiles.side**2)
    return -(-rows * min(length, _BLOCK) // _BLOCK)


def _host(steps: Sequence[KernelCall | Call], maker: Mapping[str, int], last: KernelCall) -> int | None:
    sizes = [axis.size for axis in last.kernel.axes]
    single = not last.kernel.with_role(Role.GRID) and all(size.is_Integer for size in sizes)
    if not single or math.prod(map(int, sizes)) > MOST_CHAINED_POINTS or last.kernel.sizes:
        return None
    inputs = [name for name in last.buffers if name not in last.written]
    position = max((maker[name] for name in inputs if name in maker), default=-1)
    host = steps[position] if position >= 0 else None
    if not isinstance(host, KernelCall) or not all(axis.size.is_Integer and axis.size > 0 for axis in host.kernel.axes):
        return None  # an empty grid has no last program
    if host.kernel.awaited:  # each tile has its own last program
        return None
    if host.over.keys() & {*inputs}:  # written to the memory of a tensor that has another name in this launch
        return None
    return position


def _append(chain: Kernel | None, tail: Kernel) -> Kernel:
    if chain is None:
        return tail
    return replace(chain, then=_append(chain.then, tail))
