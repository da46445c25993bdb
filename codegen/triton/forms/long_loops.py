"""Examines loops over rows or columns of a contraction for the properties that decide its configuration."""

from __future__ import annotations

import math

from fusion.codegen.triton.blocks import Blocked, Config, extent
from fusion.codegen.triton.devices import speeds
from fusion.codegen.triton.loops.skips import is_summarised, needs_lookup
from fusion.lowering.ir.expr import index_of, loads
from fusion.lowering.ir.kernel import Loop, Role, statements, values_of
from fusion.lowering.ir.sizes import with_values

SHORT_LOOP = 1024
"""Steps of a loop that is too short for descriptors to repay their creation."""


def together(blocked: Blocked) -> int:
    """Return the points of the batch dimension whose looped operands fit the cache together, divided into even groups.

    Symbolic sizes are assumed to be as traced.
    """
    known = dict(blocked.kernel.traced)
    rows = {dim.symbol for dim in blocked.grid() if dim.name != "b"}
    looped = 0
    for loop in (stmt for stmt in blocked.body if isinstance(stmt, Loop)):
        along = {dim.symbol for dim in blocked.of(loop.axes)}
        for load in {*loads(*(value for stmt in statements(loop.body) for value in values_of(stmt)))}:
            free = {symbol for index in index_of(load) for symbol in index.free_symbols}
            if along & free and not rows & free:
                dims = (dim for dim in blocked.dims if dim.symbol in free and dim.name != "b")
                sizes = (extent(with_values(dim.size, known)) for dim in dims)
                looped += load.dtype.itemsize * math.prod(sizes)
    batch = next((extent(with_values(dim.size, known)) for dim in blocked.grid() if dim.name == "b"), 1)
    groups = -(-batch // max(1, int(speeds(blocked.device).cached * blocked.device.cache) // max(1, looped)))
    return -(-batch // groups)


def skips(blocked: Blocked) -> bool:
    """Return whether a condition excludes blocks of a loop."""
    return any(isinstance(stmt, Loop) and stmt.where is not None for stmt in blocked.body)


def scans(blocked: Blocked) -> bool:
    """Return whether a condition of a loop reads tensors, so that its blocks are looked up."""
    return any(isinstance(s, Loop) and s.where is not None and needs_lookup(s.where) for s in blocked.body)


def reads_mask(blocked: Blocked) -> bool:
    """Return whether blocks in which a condition does not hold throughout read a mask from memory."""
    return any(isinstance(s, Loop) and s.where is not None and is_summarised(s.where) for s in blocked.body)


def steps(blocked: Blocked) -> int:
    """Return the length of the longest loop."""
    return max((extent(dim.size) for dim in blocked.dims if dim.role is Role.LOOP), default=0)


def is_ragged(blocked: Blocked, config: Config) -> bool:
    """Return whether the last block of a loop extends past its end."""
    looped = [dim for dim in blocked.dims if dim.role is Role.LOOP]
    return any(not (dim.size / config.block(dim.name)).is_integer for dim in looped)
