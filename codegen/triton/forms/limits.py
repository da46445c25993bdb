"""Restricts configurations to the threads and shared memory of a device.

Input: configurations for devices with warps of 32 threads and enough shared memory; output: each cut down to this
device: as many threads on wider warps, and the deepest pipeline that its shared memory holds.  Forms call this
(`Form.fit`) and add the shared memory that only they use.

Counted are the operands that a loop has in flight, and the blocks that a persistent program stores, or loads, through
shared memory.  If the compiler needs more for a layout, the kernel is compiled again with a shorter pipeline
(`launch/aot.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import sympy

from fusion.codegen.triton.blocks import Blocked, Config
from fusion.codegen.triton.devices import Device, Feature
from fusion.lowering.ir.expr import Load, index_symbols, loads
from fusion.lowering.ir.kernel import Loop, Role, statements, values_of

_LANES = 32
"""Threads per warp that configurations assume."""

_SYSTEM = 1024
"""Bytes of shared memory that the system reserves for each program on a multiprocessor."""


def fitted(
    blocked: Blocked, config: Config, *, per_multiprocessor: int = 1, stored: int = 0, loaded: int = 0
) -> Config | None:
    """Return a configuration with as many stages as fit the device; None if not even a short pipeline fits.

    Args:
        per_multiprocessor: programs that share the memory of a multiprocessor.
        stored, loaded: bytes of a program for blocks that its epilogue stores and loads.
    """
    device = blocked.device
    available = device.shared_per_program
    if per_multiprocessor > 1:
        available = min(available, device.shared_per_multiprocessor // per_multiprocessor - _SYSTEM)
    stages = min(config.num_stages, stages_within(device, _stage(blocked, config), available - stored - loaded))
    shortest = replace(config, num_stages=min(config.num_stages, shortest_pipeline(device)))
    if stages < shortest.num_stages or room(blocked, shortest) + stored + loaded > available:
        return None
    return replace(config, num_stages=stages)


def room(blocked: Blocked, config: Config) -> int:
    """Return the bytes of shared memory of a program's operands."""
    return max(1, config.num_stages - _in_registers(blocked.device)) * _stage(blocked, config)


def on_warps(config: Config, device: Device) -> Config:
    """Return the configuration with `num_warps` rescaled to this device's warp width: as many threads."""
    if device.warp == _LANES:
        return config
    return replace(config, num_warps=max(1, config.num_warps * _LANES // device.warp))


def stages_within(device: Device, each: int, room: int | None = None) -> int:
    """Return the number of stages of `each` bytes that fit a program, at least one.

    Matrix units that read shared memory themselves need the operands of the current product there, too; others read
    them into registers first, so that only the operands in flight take shared memory.
    """
    room = device.shared_per_program if room is None else room
    return max(1, room // max(1, each) + _in_registers(device))


def shortest_pipeline(device: Device) -> int:
    """Return the fewest stages with which one is loaded while another is multiplied."""
    return 2 + _in_registers(device)


def _in_registers(device: Device) -> int:
    """Return the stages of a pipeline that take no shared memory: the one in registers."""
    return 0 if device.has(Feature.ASYNC_UNITS) else 1


def in_flight(blocked: Blocked) -> list[Load]:
    """Return the loads of a loop, without products, that differ in each step and span all axes held in it."""
    dims = {dim.symbol for dim in blocked.dims if dim.role is not Role.GRID}
    loops = [stmt for stmt in blocked.body if isinstance(stmt, Loop)]
    every = loads(*(value for loop in loops for stmt in statements(loop.body) for value in values_of(stmt)))
    return [load for load in dict.fromkeys(every) if dims <= index_symbols(load)]


def _stage(blocked: Blocked, config: Config) -> int:
    """Return the bytes of the operands that one step of a loop multiplies, or folds."""
    if not blocked.dots:
        if config.num_stages == 1:
            return 0
        return sum(load.dtype.itemsize * _points(blocked, config, index_symbols(load)) for load in in_flight(blocked))
    looped = {dim.symbol for dim in blocked.dims if dim.role is Role.LOOP}
    total = 0
    for operand in dict.fromkeys(arg for dot in blocked.dots for arg in dot.args):
        spans = [index_symbols(load) for load in loads(operand) if looped & index_symbols(load)]
        sizes = [load.dtype.itemsize for load in loads(operand) if looped & index_symbols(load)]
        if spans:  # several loads are combined into one tile
            width = sizes[0] if len(sizes) == 1 else operand.dtype.itemsize
            total += width * _points(blocked, config, set().union(*spans))
    return total


def _points(blocked: Blocked, config: Config, symbols: Collection[sympy.Symbol]) -> int:
    return math.prod(config.block(dim.name) for dim in blocked.dims if dim.symbol in symbols)
