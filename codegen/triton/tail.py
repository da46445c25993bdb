"""Tail: what the last program of a grid goes on with, or the last one of each tile, in the same launch.

What enters is a kernel with others to follow it (`Kernel.then`); what leaves are their layouts and the lines that call
them at the end of the first.  Programs count themselves as they finish, in one int32 of memory.  The one that finds all
others done runs the tail, reads past its own first-level cache what they have written, and sets the count to 0 for the
next launch.  A grid of no programs has no last one: the scheduler gives followers only to grids that are not empty.

The tail runs on as many warps as the kernel it follows.  What would not fit their registers is walked in blocks.  What
follows tile by tile has the blocks of the kernel it follows, and a count for each tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy

from fusion.codegen.numerics import Numerics
from fusion.codegen.triton.blocks import Blocked, Config, Dim, block, block_as, extent, power_of_two
from fusion.codegen.triton.call import call_of
from fusion.codegen.triton.choices import contractions
from fusion.codegen.triton.choices.rows import configure
from fusion.codegen.triton.devices import Device
from fusion.codegen.triton.expressions.indices import Layout, lay_out
from fusion.codegen.triton.rewrites.walk import walked
from fusion.lowering.kernel import Kernel, KernelAxis, Role, folds, stored

COUNTER = "counter"
"""The parameter, after tensors and sizes, that points to the number of finished programs."""

_PER_THREAD = 16  # elements of a block, so that the tail does not need more registers than the grid


@dataclass(frozen=True, slots=True)
class Follower:
    """A kernel that follows in a launch.

    Attributes:
        name: of its function.
        behind: the parameters that the launch has written before it runs.
        starts: of its GRID dimensions, where the block begins: variables of the function that calls it.
    """

    name: str
    layout: Layout
    behind: frozenset[str]
    starts: tuple[str, ...] = ()

    @property
    def call(self) -> str:
        """The line that runs it."""
        return call_of(self.name, self.layout, *self.starts)


def followers(
    kernel: Kernel, warps: int, device: Device, numerics: Numerics, *, within_limit: bool = False
) -> list[Follower]:
    """The kernels that follow `kernel` in its launch, in order, laid out for `warps` warps."""
    found: list[Follower] = []
    taken, behind = {kernel.name}, stored(kernel)
    for number, step in enumerate(_chain(kernel), 1):
        name = step.name if step.name not in taken else f"{step.name}_{number}"
        taken.add(name)
        blocked, config = _fitted(step, warps, device, numerics)
        found.append(Follower(name, lay_out(blocked, config, within_limit=within_limit), behind))
        behind |= stored(step)
    return found


def of_tile(kernel: Kernel, first: Layout) -> Follower:
    """What follows `kernel`, laid out as `first`, tile by tile."""
    assert kernel.then is not None
    name = kernel.then.name if kernel.then.name != kernel.name else f"{kernel.name}_1"
    kept = {axis.symbol for axis in kernel.then.axes}
    dims = [dim for dim in first.blocked.dims if any(axis.symbol in kept for axis in dim.axes)]
    layout = lay_out(block_as(kernel.then, dims, first.blocked.device), first.config)
    return Follower(name, layout, stored(kernel), tuple(start_of(dim) for dim in layout.blocked.grid()))


def start_of(dim: Dim) -> str:
    """The name of the first index of a block of `dim`, in a function that is told."""
    return f"{dim.name}0"


def follows_by_tile(blocked: Blocked, awaited: Sequence[KernelAxis]) -> bool:
    """Do programs that differ along these GRID axes alone make parts of one tile, and have all else in common?"""
    batch = [dim for dim in blocked.grid() if dim.name == "b"]
    return blocked.contraction and not blocked.chained and [dim.axes for dim in batch] == [tuple(awaited)]


def with_room(config: Config, kernel: Kernel, device: Device) -> Config:
    """`config` with up to four warps where fewer would walk the tail of `kernel` in many steps."""
    if kernel.awaited:
        return config
    points = [math.prod(extent(axis.size) for axis in step.axes) for step in _chain(kernel)]
    wanted = min(4, power_of_two(-(-max(points, default=0) // (device.warp * _PER_THREAD))))
    return replace(config, num_warps=max(config.num_warps, wanted))


def ending_of_tile(step: Follower, tile: str, parts: sympy.Expr) -> list[str]:
    """The last lines of the first function, which `step` follows once all `parts` of the tile of this number are there.

    A program's stores come before its count, and the last count comes before what the last program loads.
    """
    return [
        "# The last program to get here of those that make parts of a tile goes on with what all of them have written.",
        "tl.debug_barrier()",
        f'done = tl.atomic_add({COUNTER} + {tile}, 1, sem="acq_rel")',
        f"if done == {parts - 1}:",
        f"    {step.call}",
        f"    tl.store({COUNTER} + {tile}, 0)  # for the next launch",
    ]


def ending(steps: Sequence[Follower]) -> list[str]:
    """The last lines of the first function."""
    lines = [
        "# The last program to get here goes on with what all of them have written.",
        "tl.debug_barrier()",
        f'done = tl.atomic_add({COUNTER}, 1, sem="acq_rel")',
        "if done == tl.num_programs(0) - 1:",
    ]
    for number, step in enumerate(steps):
        if number:
            lines.append("    tl.debug_barrier()")
        lines.append(f"    {step.call}")
    return [*lines, f"    tl.store({COUNTER}, 0)  # for the next launch"]


def _chain(kernel: Kernel) -> list[Kernel]:
    found: list[Kernel] = []
    while kernel.then is not None:
        kernel = kernel.then
        found.append(kernel)
    return found


def _fitted(step: Kernel, warps: int, device: Device, numerics: Numerics) -> tuple[Blocked, Config]:
    """Blocks that the registers of `warps` warps hold, where axes can be walked."""
    blocked = block(step, device)
    if blocked.contraction:
        return blocked, contractions.candidates(blocked, numerics)[0]
    room, config = warps * device.warp * _PER_THREAD, configure(blocked)
    sets = {frozenset(fold.over) for fold in folds(step).values()}
    if _elements(config) > room and len(sets) <= 1 and all(axis.role is Role.WHOLE for axis in step.axes):
        folded = next(iter(sets), frozenset())
        blocked = block(walked(step, tuple(axis.symbol for axis in step.axes if axis.symbol in folded)), device)
        config = configure(blocked)
    blocks = dict(config.blocks)
    for dim in blocked.dims:
        while dim.role is Role.LOOP and blocks[dim.name] > 1 and math.prod(blocks.values()) > room:
            blocks[dim.name] //= 2
    return blocked, replace(config, blocks=tuple(blocks.items()))


def _elements(config: Config) -> int:
    return math.prod(size for _, size in config.blocks)
