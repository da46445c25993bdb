"""Limits: what a device has room for, of threads and of shared memory.

What enters are configurations, as they are good on devices with warps of 32 threads and room enough; what leaves is
each cut down to this device: as many threads on wider warps, and as deep a pipeline as its shared memory holds.  Forms
ask here (`Form.fit`) and add what they alone keep in shared memory.

What is counted are the operands that a loop has in flight, and the blocks that a persistent program stores, or loads,
through shared memory.  The compiler may find that a layout needs more, and is then given a shorter pipeline
(`launch/aot.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import sympy

from fusion.codegen.triton.blocks import Blocked, Config
from fusion.codegen.triton.devices import Device, Feature
from fusion.lowering.expr import Load, index_of, loads
from fusion.lowering.kernel import Role

_LANES = 32
"""Threads of the warps in which configurations are counted."""

_SYSTEM = 1024
"""Bytes of shared memory that the system takes for each program on a multiprocessor."""


def fitted(
    blocked: Blocked, config: Config, *, per_multiprocessor: int = 1, stored: int = 0, loaded: int = 0
) -> Config | None:
    """A configuration with as many stages as there is room for; None where there is none for a pipeline.

    Args:
        per_multiprocessor: programs that share the memory of a multiprocessor.
        stored, loaded: bytes of a program for blocks that it stores and loads behind its products.
    """
    device = blocked.device
    available = device.shared_per_program
    if per_multiprocessor > 1:
        available = min(available, device.shared_per_multiprocessor // per_multiprocessor - _SYSTEM)
    stages = min(config.num_stages, stages_within(device, _stage(blocked, config), available - stored))
    shortest = replace(config, num_stages=min(config.num_stages, shortest_pipeline(device)))
    if stages < shortest.num_stages or room(blocked, shortest) + stored + loaded > available:
        return None
    return replace(config, num_stages=stages)


def room(blocked: Blocked, config: Config) -> int:
    """Bytes of shared memory that the operands of a program take."""
    return max(1, config.num_stages - _beyond(blocked.device)) * _stage(blocked, config)


def on_warps(config: Config, device: Device) -> Config:
    """The configuration with as many threads on this device's warps."""
    if device.warp == _LANES:
        return config
    return replace(config, num_warps=max(1, config.num_warps * _LANES // device.warp))


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


def _points(blocked: Blocked, config: Config, varied: Collection[sympy.Symbol]) -> int:
    return math.prod(config.block(dim.name) for dim in blocked.dims if dim.symbol in varied)


def _varied(load: Load) -> set[sympy.Symbol]:
    return {symbol for index in index_of(load) for symbol in index.free_symbols}
