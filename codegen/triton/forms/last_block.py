"""Generates launches in which the last program of a grid, or of each tile, runs further kernels.

Programs count themselves as they finish, in one int32 of memory.  The one whose count is the last runs the kernels that
follow (`Kernel.then`), loads past its own first-level cache the tensors that others have written, and sets the count to
0 for the next launch.  A grid of no programs has no last one: the scheduler gives followers only to grids that are not
empty.

Followers run on as many warps as the kernel they follow.  Rows that would not fit their registers are folded in steps.
A kernel that follows tile by tile has the blocks of the kernel it follows, and a count for each tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
from typing_extensions import Self

from fusion.codegen.numerics import Numerics
from fusion.codegen.triton.arguments import COUNTER, call_of
from fusion.codegen.triton.blocks import Blocked, Config, Dim, block, block_as, extent, power_of_two
from fusion.codegen.triton.devices import Device
from fusion.codegen.triton.expressions.code import Code, compose
from fusion.codegen.triton.expressions.indices import Layout, lay_out
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.file import Launch, blocks_of, file_of
from fusion.codegen.triton.forms import single_kernel
from fusion.codegen.triton.forms.chained import DescribedConfig
from fusion.codegen.triton.forms.form import Form, Refused, Task, count_of
from fusion.codegen.triton.forms.maps import Maps
from fusion.codegen.triton.forms.persistent_product import PersistentConfig
from fusion.codegen.triton.forms.pointer_product import PointerProduct
from fusion.codegen.triton.forms.rows import Rows
from fusion.codegen.triton.forms.scans import Scans
from fusion.codegen.triton.rewrites.blocked_loops import in_blocks
from fusion.codegen.triton.writer import FunctionRole, Writer
from fusion.lowering.ir.kernel import Kernel, KernelAxis, Role, folds, stored

_PER_THREAD = 16  # elements of a block, so that followers do not need more registers than the grid


@dataclass(frozen=True)
class LastBlock(Form):
    """The plan for a kernel that others follow in its launch."""

    name = "last block"
    takes = (Config, PersistentConfig, DescribedConfig)

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept any kernel that others follow."""
        return cls(task) if task.kernel.then is not None else Refused("no kernel follows it")

    def configs(self) -> tuple[Config, ...]:
        """Return the configurations of the first kernel, with warps enough for its followers."""
        return tuple(self._on_warps_of_followers(config) for _, config in single_kernel.candidates(self.task))

    def relative_time(self, config: Config) -> float:
        """Return the relative time of the first kernel."""
        return single_kernel.taking(self.task, config).relative_time(config)

    def _on_warps_of_followers(self, config: Config) -> Config:
        """Return `config` with up to four warps, if fewer would fold the rows of the followers in many steps."""
        if self.task.kernel.awaited:
            return config
        points = [math.prod(extent(axis.size) for axis in step.axes) for step in _chain(self.task.kernel)]
        wanted = min(4, power_of_two(-(-max(points, default=0) // (self.task.device.warp * _PER_THREAD))))
        return replace(config, num_warps=max(config.num_warps, wanted))

    def emit(self, config: Config, writer: Writer) -> str | None:
        """Return the followers' functions, then the first kernel's, which ends by counting itself, as a file."""
        kernel, form = self.task.kernel, single_kernel.taking(self.task, config)
        layout = form.lay_out(config, writer)
        followers = [_of_tile(kernel, layout)] if kernel.awaited else _followers(self.task, config, writer)
        limit = writer.limit([layout, *(step.layout for step in followers)])
        if writer.within_limit and limit is None:
            return None
        functions = [writer.function(step.layout, step.name, role=step.role) for step in followers]
        functions.append(form.function(layout, kernel.name, writer, _leading(kernel, followers)))
        tiles = [dim for dim in layout.blocked.grid() if dim.name != "b"] if kernel.awaited else []
        launch = Launch(
            kernel,
            writer.device,
            config,
            layout.constants,
            count_of(layout),
            limit,
            tiles=" * ".join(blocks_of(layout, dim) for dim in tiles),
            per_multiprocessor=form.per_multiprocessor(config),
        )
        return file_of(launch, functions, strict=writer.numerics.strict)


def follows_by_tile(blocked: Blocked, awaited: Sequence[KernelAxis]) -> bool:
    """Return whether programs that differ along these GRID axes alone compute parts of one tile, and share all other
    dimensions.
    """
    batch = [dim for dim in blocked.grid() if dim.name == "b"]
    return blocked.contraction and not blocked.chained and [dim.axes for dim in batch] == [tuple(awaited)]


# Followers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Follower:
    """A kernel that follows in a launch.

    Attributes:
        name: the name of its function.
        behind: the parameters that the launch writes before it runs.
        starts: the starts of its block along GRID dimensions, as variables of the function that calls it.
    """

    name: str
    layout: Layout
    behind: frozenset[str]
    starts: tuple[str, ...] = ()

    @property
    def call(self) -> Code:
        """Return the line that runs it."""
        return call_of(self.name, self.layout, *self.starts)

    @property
    def role(self) -> FunctionRole:
        """Return its role in the launch."""
        starts = {dim: _start_of(dim) for dim in self.layout.blocked.grid()}
        return FunctionRole(starts=starts, behind=self.behind)


def _followers(task: Task, config: Config, writer: Writer) -> list[_Follower]:
    """Return the kernels that follow one in its launch, in order, laid out for its warps."""
    kernel, followers = task.kernel, list[_Follower]()
    names, behind = {kernel.name}, stored(kernel)
    for number, step in enumerate(_chain(kernel), 1):
        name = step.name if step.name not in names else f"{step.name}_{number}"
        names.add(name)
        blocked, fitted = _fitted(step, config.num_warps, task.device, task.numerics)
        followers.append(_Follower(name, lay_out(blocked, fitted, within_limit=writer.within_limit), behind))
        behind |= stored(step)
    return followers


def _of_tile(kernel: Kernel, first: Layout) -> _Follower:
    """Return the kernel that follows `kernel`, laid out as `first`, tile by tile."""
    assert kernel.then is not None
    name = kernel.then.name if kernel.then.name != kernel.name else f"{kernel.name}_1"
    kept = {axis.symbol for axis in kernel.then.axes}
    dims = [dim for dim in first.blocked.dims if any(axis.symbol in kept for axis in dim.axes)]
    layout = lay_out(block_as(kernel.then, dims, first.blocked.device), first.config)
    return _Follower(name, layout, stored(kernel), tuple(_start_of(dim) for dim in layout.blocked.grid()))


def _start_of(dim: Dim) -> str:
    """Return the parameter with the first index of a block of `dim`."""
    return f"{dim.name}0"


def _chain(kernel: Kernel) -> list[Kernel]:
    chain: list[Kernel] = []
    while kernel.then is not None:
        kernel = kernel.then
        chain.append(kernel)
    return chain


def _fitted(step: Kernel, warps: int, device: Device, numerics: Numerics) -> tuple[Blocked, Config]:
    """Return blocks that the registers of `warps` warps hold, where axes can be folded in steps."""
    task = Task(step, device, numerics)
    if task.blocked.contraction:
        return task.blocked, PointerProduct(task).configs()[0]
    blocked, config = task.blocked, _of_rows(task)
    room, sets = warps * device.warp * _PER_THREAD, {frozenset(fold.over) for fold in folds(step).values()}
    if _elements(config) > room and len(sets) <= 1 and all(axis.role is Role.WHOLE for axis in step.axes):
        folded = next(iter(sets), frozenset())
        blocked = block(in_blocks(step, tuple(axis.symbol for axis in step.axes if axis.symbol in folded)), device)
        config = _of_rows(Task.of(blocked, numerics))
    blocks = dict(config.blocks)
    for dim in blocked.dims:
        while dim.role is Role.LOOP and blocks[dim.name] > 1 and math.prod(blocks.values()) > room:
            blocks[dim.name] //= 2
    return blocked, replace(config, blocks=tuple(blocks.items()))


def _of_rows(task: Task) -> Config:
    """Return the default configuration of a follower without contraction."""
    return next(plan for form in (Maps, Scans, Rows) if not isinstance(plan := form.applies(task), Refused)).configs()[
        0
    ]


def _elements(config: Config) -> int:
    return math.prod(size for _, size in config.blocks)


# The end of the first kernel ------------------------------------------------------------------------------------------


def _leading(kernel: Kernel, followers: Sequence[_Follower]) -> FunctionRole:
    """Return the role of the first function, which counts its programs and runs the followers."""

    def ending(values: Values) -> list[Code]:
        if kernel.awaited:
            assert values.block is not None, "a kernel with awaited programs is a contraction"
            parts = sympy.Mul(*(axis.size for axis in kernel.awaited))
            return _end_of_tile(followers[0], values.block, parts)
        return _end(followers)

    return FunctionRole(
        ending=ending,
        counters={COUNTER: "int32: finished programs, 0 between launches"},
        reserved=["done", *(step.name for step in followers)],
    )


_WRITTEN = "what all of them have written."


def _end_of_tile(step: _Follower, tile: Code, parts: sympy.Expr) -> list[Code]:
    """Return the last lines of the first function, which `step` follows once all `parts` of the tile of this number
    exist.

    A program's stores come before its count, and the last count comes before the loads of the last program.
    """
    return [
        Code(f"# The last program to get here of those that make parts of a tile goes on with {_WRITTEN}"),
        Code("tl.debug_barrier()"),
        compose('done = tl.atomic_add({} + {}, 1, sem="acq_rel")', COUNTER, tile),
        Code(f"if done == {parts - 1}:"),
        compose("    {}", step.call),
        compose("    tl.store({} + {}, 0)  # for the next launch", COUNTER, tile),
    ]


def _end(followers: Sequence[_Follower]) -> list[Code]:
    """Return the last lines of the first function."""
    lines = [
        Code(f"# The last program to get here goes on with {_WRITTEN}"),
        Code("tl.debug_barrier()"),
        compose('done = tl.atomic_add({}, 1, sem="acq_rel")', COUNTER),
        Code("if done == tl.num_programs(0) - 1:"),
    ]
    for number, step in enumerate(followers):
        if number:
            lines.append(Code("    tl.debug_barrier()"))
        lines.append(compose("    {}", step.call))
    return [*lines, compose("    tl.store({}, 0)  # for the next launch", COUNTER)]
