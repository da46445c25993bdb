"""Limits: what a device has room for, of threads and of shared memory.

What enters are configurations, as they are good on devices with warps of 32 threads and room enough; what leaves are
those that fit this device, each cut down to it: as many threads on wider warps, and as deep a pipeline as its shared
memory holds.  Other files ask nothing about room.

What is counted are the operands that a loop has under way, and the blocks of the persistent form that are stored, or
loaded, through shared memory.  The compiler may find that a layout needs more, and is then given a shorter pipeline
(`launch/aot.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

import sympy

from fusion.codegen.triton.blocks import Blocked, Config
from fusion.codegen.triton.devices import Device, Feature
from fusion.codegen.triton.products.descriptors import loads_tiles
from fusion.lowering.expr import Load, index_of, loads
from fusion.lowering.kernel import Role, Store

_LANES = 32
"""Threads of the warps in which configurations are counted."""

_SYSTEM = 1024
"""Bytes of shared memory that the system takes for each program on a multiprocessor."""


def within(blocked: Blocked, configs: Iterable[Config]) -> tuple[Config, ...]:
    """The configurations that fit the device, in their order; if none do, the one that needs the least."""
    cut = [_on_warps(config, blocked.device) for config in configs]
    fitting = [found for config in cut if (found := fitted(blocked, config)) is not None]
    if not fitting:
        least = min(cut, key=lambda config: _room(blocked, replace(config, num_stages=1)))
        fitting = [replace(least, num_stages=1)]
    return tuple(dict.fromkeys(fitting))


def fitted(blocked: Blocked, config: Config) -> Config | None:
    """A configuration with as many stages as there is room for; None where there is none for a pipeline."""
    device = blocked.device
    room = device.shared_per_program
    if config.per_processor > 1:
        room = min(room, device.shared_per_multiprocessor // config.per_processor - _SYSTEM)
    each = _stage(blocked, config)
    stages = min(config.num_stages, stages_within(device, each, room - _ending(blocked, config)))
    shortest = replace(config, num_stages=min(config.num_stages, shortest_pipeline(device)))
    if config.groups:
        return config  # `grouped` counts its slots
    if stages < shortest.num_stages or _room(blocked, shortest, loading=True) > room:
        return None
    return replace(config, num_stages=stages)


def stages_within(device: Device, each: int, room: int | None = None) -> int:
    """How many stages of so many bytes a program has room for, at least one.

    Matrix units that read shared memory by themselves need what is multiplied there, too; others read it into registers
    first, and what is multiplied needs no place beside what is fetched.
    """
    room = device.shared_per_program if room is None else room
    return max(1, room // max(1, each) + _beyond(device))


def shortest_pipeline(device: Device) -> int:
    """The fewest stages of which one is fetched while another is multiplied."""
    return 2 + _beyond(device)


def _beyond(device: Device) -> int:
    """Stages of a pipeline that take no shared memory: the one that is in registers."""
    return 0 if device.has(Feature.ASYNC_UNITS) else 1


def _on_warps(config: Config, device: Device) -> Config:
    """The configuration with as many threads on this device's warps."""
    if device.warp == _LANES:
        return config
    return replace(config, num_warps=max(1, config.num_warps * _LANES // device.warp))


def _room(blocked: Blocked, config: Config, *, loading: bool = False) -> int:
    """Bytes of shared memory of a program, with those of tiles that are loaded behind its products, or without."""
    staged = max(1, config.num_stages - _beyond(blocked.device))
    tiles = 2 if loading and config.persistent and blocked.dots and loads_tiles(blocked) else 1
    return staged * _stage(blocked, config) + tiles * _ending(blocked, config)


def _stage(blocked: Blocked, config: Config) -> int:
    """Bytes of the operands that one step of a loop multiplies."""
    walked = {dim.symbol for dim in blocked.dims if dim.role is Role.LOOP}
    total = 0
    for operand in dict.fromkeys(arg for dot in blocked.dots for arg in dot.args):
        fetched = [_varied(load) for load in loads(operand) if walked & _varied(load)]
        sizes = [load.dtype.itemsize for load in loads(operand) if walked & _varied(load)]
        if fetched:  # of several loads there is one tile, what is made of them
            width = sizes[0] if len(sizes) == 1 else operand.dtype.itemsize
            total += width * _points(blocked, config, set().union(*fetched))
    return total


def _ending(blocked: Blocked, config: Config) -> int:
    """Bytes of a part of the block that a persistent program stores at a time, on its way out."""
    if not config.persistent or config.groups:
        return 0
    width = max((stmt.value.dtype.itemsize for stmt in blocked.body if isinstance(stmt, Store)), default=0)
    return config.block("m") * config.block("n") * min(width, 2) // config.parts  # wider ones pass by


def _points(blocked: Blocked, config: Config, varied: Collection[sympy.Symbol]) -> int:
    return math.prod(config.block(dim.name) for dim in blocked.dims if dim.symbol in varied)


def _varied(load: Load) -> set[sympy.Symbol]:
    return {symbol for index in index_of(load) for symbol in index.free_symbols}
