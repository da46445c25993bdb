"""Generates kernels that fold rows or columns, and multiply no matrices.

Short rows have a warp each, long ones a few dozen elements per thread; rows that a program cannot hold are folded in
steps.  Where the GRID axis is contiguous, columns are folded (`columns.py`).  The numbers were measured on an H200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import Self

from fusion.codegen.triton.blocks import Blocked, Config, Dim, extent, power_of_two
from fusion.codegen.triton.blocks.dims import WORD
from fusion.codegen.triton.fixed_order import STEP
from fusion.codegen.triton.forms import limits
from fusion.codegen.triton.forms.columns import Columns, reads_again
from fusion.codegen.triton.forms.form import Form, Refused, Task
from fusion.codegen.triton.forms.traffic import (
    MOST_IN_WARP,
    bytes_of_row,
    neighbours,
    row_loads,
    streams,
    warps_for,
)
from fusion.lowering.ir.kernel import Fold, Loop, Prefix, Role, Store, statements
from fusion.lowering.ir.scalar_ops import EXTREMES, HALVES

_LEAST_SPLIT = 4
"""Blocks of a row that are worth two loops instead of one."""

_FLOOR = 3072
"""Bytes that a program moves so that memory, rather than the rate at which programs start, bounds many short rows.
(measured: docs/performance.md, `_FLOOR`)
"""
_LONG_ENOUGH = 16
"""Programs per multiprocessor that such rows still have."""
_PLACED = 4
"""A row without positions of extremes has this many times the warps of a row with them, whose exchanges between warps
have two values, and compare them.  (measured: docs/performance.md, `_PLACED`)
"""

_ROW_WARPS = {1024: 2, 2048: 2, 4096: 8, 8192: 8, 16384: 16}  # padded length of a row held whole → warps; above: 32
_LONG_ROW = 16384
"""Padded length from which on a row of one tensor has half as many, so that two programs share a multiprocessor.
(measured: docs/performance.md, `_LONG_ROW`)
"""

_MANY_ROWS = 4
"""From this many rows per multiprocessor, rows that are overwritten in place run fastest in steps of their own."""

_ALONE = (16384, 32)
"""Elements and warps of a step where rows are read again: one program has a multiprocessor to itself, and no more rows
are in flight than the cache holds until then.  (measured: docs/performance.md, `_ALONE`)
"""

_PAIRED = (8192, 32)
"""The same for sums of 16-bit rows that are short enough for two programs on a multiprocessor.
(measured: docs/performance.md, `_PAIRED`)
"""

_PAIRED_BYTES = 1 << 18
"""The longest rows of which the cache holds two for each multiprocessor."""

_ODD = (4096, 16)
"""The same where such rows end within a word, and are stored to other memory.  (measured: docs/performance.md, `_ODD`)
"""

_IN_PLACE = (8192, 16)
"""The same for rows of 16-bit floats that are overwritten in place: the cache holds more of them, and the registers of
a gradient allow only one program of 32 warps, so that nothing else runs while it waits.
(measured: docs/performance.md, `_IN_PLACE`)
"""

_HELD_LENGTH = 256
"""The shortest row that is worth loads in flight."""

_SHORT_STEP, _SHORT_ROWS, _SHORT_EACH = 2048, 16, 8
"""Elements and rows, at most, of a step of shorter rows that are folded together with their columns, and elements per
thread: an element takes an address in each tensor, a value, and a sum.  (measured: docs/performance.md, `_SHORT_STEP`)
"""

_HELD_WARPS, _HELD_ELEMENTS, _HELD_TILES, _HELD_STAGES = 4, 32, 6, 3
"""For rows that are held together with sums of their columns: warps, elements per thread, with at most `_HELD_TILES`
sums and operands, and pipeline stages.  (measured: docs/performance.md, `_HELD_WARPS`)
"""


@dataclass(frozen=True)
class Rows(Form):
    """The plan for a kernel with dimensions that are folded."""

    name = "rows"

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept any kernel without contraction that has folds and no scans."""
        blocked = task.blocked
        if blocked.contraction or all(dim.role is Role.GRID for dim in blocked.dims):
            return Refused("it multiplies matrices, or folds nothing")
        return Refused("it scans") if scans(blocked) else cls(task)

    def configs(self) -> tuple[Config, ...]:
        """Return the default, chosen from sizes alone, and its neighbours."""
        return neighbours(self.blocked, self.default())

    def default(self) -> Config:
        """Return the default configuration."""
        blocked = self.blocked
        reduced = [dim for dim in blocked.dims if dim.role is not Role.GRID]
        grid = {dim.name: dim for dim in blocked.grid()}
        if len(reduced) > 1:
            return self._held(*reduced) if _carries(blocked) else _several(reduced)
        if blocked.dims[-1] is not reduced[0]:
            return self.columns(reduced[0], grid["x"], extent(grid["b"].size) if "b" in grid else 1)
        return self._rows(reduced[0], grid.get("x"))

    def _held(self, r: Dim, q: Dim) -> Config:
        """Return the configuration for rows along `q` that are held one after another, with sums of their columns.

        The registers of few warps hold the sums and the operands of some rows; loads of the next rows are in flight.
        """
        folds = [stmt for stmt in statements(self.blocked.body, Fold) if self.blocked.of(stmt.over) == (r,)]
        tiles = len(folds) + len(limits.in_flight(self.blocked))
        length = power_of_two(extent(q.size))
        each = _HELD_ELEMENTS // power_of_two(-(-tiles // _HELD_TILES))
        warps = max(_HELD_WARPS, length // (each * self.blocked.device.warp))
        rows = max(1, min(_HELD_WARPS * each * self.blocked.device.warp // length, power_of_two(extent(r.size))))
        return Config(((r.name, rows), (q.name, length)), num_warps=min(32, warps), num_stages=_HELD_STAGES)

    def _rows(self, r: Dim, x: Dim | None) -> Config:
        """Return the configuration for a contiguous reduced axis."""
        blocked, length = self.blocked, power_of_two(extent(r.size))
        rows = extent(x.size) if x is not None else 1
        if r.role is Role.LOOP and length > 1024:
            block, warps = self.steps(r, length, rows)
            return Config((("r", min(length, block)),), num_warps=warps, split=self.splits(r, block))
        if length <= 128:  # several rows per warp
            block = max(1, min(2048 // length, power_of_two(rows)))
            while block > 1 and -(-rows // block) < 2 * blocked.device.multiprocessors:
                block //= 2
            return Config((("x", block), ("r", length)), num_warps=min(4, warps_for(block * length, 8)))
        block = self._rows_per_warp(r, length, rows)
        if block > 1:
            return Config((("x", block), ("r", length)), num_warps=1)
        warps = 1 if length <= 512 else _ROW_WARPS.get(length, 32)
        if rows < 4 * blocked.device.multiprocessors:  # too few rows to hide latency behind other programs
            warps = max(warps, min(16, warps_for(length, 8)))
        elif any(fold.op in EXTREMES for fold in statements(blocked.body, Fold)):
            warps = max(1, warps // _PLACED)
        elif length >= _LONG_ROW and len(row_loads(blocked, r)) == 1 and not scans(blocked):
            warps //= 2
        return Config((("r", length),), num_warps=warps)

    def _rows_per_warp(self, r: Dim, length: int, rows: int) -> int:
        """Return how many rows a program of one warp computes, so that many short rows are few programs."""
        least, most = _FLOOR / max(1, bytes_of_row(self.blocked, r)), MOST_IN_WARP // length
        block = min(power_of_two(math.ceil(least)), max(1, most))
        enough = _LONG_ENOUGH * self.blocked.device.multiprocessors
        while block > 1 and rows < block * enough:
            block //= 2
        return block

    def splits(self, r: Dim, block: int) -> bool:
        """Return whether the end of a row is a loop of its own, so that the blocks before it have no masks.

        A mask that ends within 16 bytes makes each thread store one element at a time, in every block that has it.
        (measured: docs/performance.md, `rows`)
        """
        least = 1 if _ends_within_word(self.blocked, r) else _LEAST_SPLIT
        return not (r.size.is_Integer and int(r.size) < least * block)

    def steps(self, r: Dim, length: int, rows: int) -> tuple[int, int]:
        """Return the elements and warps of each step along a row.

        Many rows use small blocks, since others run while one waits, with few warps for a running value.  Few rows use
        as many elements as can be in flight at once (measured: docs/performance.md, `rows`).
        """
        blocked, warps = self.blocked, step_warps(length)
        if blocked.invariant:
            return STEP, 4
        running = any(isinstance(stmt, Fold) and stmt.carry is not None for stmt in statements(blocked.body))
        if length > 2 * _ALONE[0] and reads_again(blocked):
            halves = all(param.dtype in HALVES for param in streams(blocked))
            many = rows >= _MANY_ROWS * blocked.device.multiprocessors
            if many and halves and all(param.written for param in streams(blocked)):
                return _IN_PLACE
            if halves and _ends_within_word(blocked, r):
                return _ODD
            return _PAIRED if halves and not running and 2 * length <= _PAIRED_BYTES else _ALONE
        if rows < 8 * blocked.device.multiprocessors:
            return warps * 512, warps
        return (4096, 4) if running else (2048, 8)

    def columns(self, r: Dim, x: Dim, times: int) -> Config:
        """Return the configuration for a contiguous GRID axis, each block of which is computed `times` times."""
        return Columns(self.blocked, r, x, times).config()


def _carries(blocked: Blocked) -> bool:
    """Return whether a loop over long rows folds each of them, and their columns as well."""
    loops = [stmt for stmt in blocked.body if isinstance(stmt, Loop)]
    folded = {frozenset(stmt.over) for loop in loops for stmt in loop.body if isinstance(stmt, Fold)}
    held = [power_of_two(extent(dim.size)) for dim in blocked.dims if dim.role is Role.WHOLE]
    return len(loops) == 1 and len(folded) == 2 and frozenset(loops[0].axes) in folded and min(held) >= _HELD_LENGTH


def step_warps(length: int) -> int:
    """Return the warps of a program that reads a row of this length in steps."""
    return 16 if length >= 16384 else 8


def scans(blocked: Blocked) -> bool:
    """Return whether the kernel contains a scan."""
    return any(isinstance(stmt, Prefix) for stmt in statements(blocked.body))


def _ends_within_word(blocked: Blocked, r: Dim) -> bool:
    """Return whether a stored row has a length that is not a multiple of 16 bytes."""
    loops = [stmt for stmt in statements(blocked.body, Loop) if blocked.of(stmt.axes) == (r,)]
    stored = [blocked.kernel.param(stmt.param) for loop in loops for stmt in loop.body if isinstance(stmt, Store)]
    return any(r.size.is_Integer and int(r.size) * param.dtype.itemsize % WORD for param in stored)


def _several(reduced: list[Dim]) -> Config:
    """Return a configuration for folds over different axes: a full tile per program, with loops in steps that keep it
    small.
    """
    looped, held = ([dim for dim in reduced if dim.role is role] for role in (Role.LOOP, Role.WHOLE))
    if len(looped) == len(held) == 1:
        return _short_rows(*looped, *held)
    room = 8192
    blocks: list[tuple[str, int]] = []
    for dim in sorted(reduced, key=lambda dim: dim.role is Role.LOOP):
        length = power_of_two(extent(dim.size))
        if dim.role is Role.LOOP:
            length = min(length, max(1, room))
        room = max(1, room // length)
        blocks.append((dim.name, length))
    elements = math.prod(length for _, length in blocks)
    return Config(tuple(blocks), num_warps=min(16, warps_for(elements, 16)))


def _short_rows(r: Dim, q: Dim) -> Config:
    """Return a configuration for rows along `q` that are held in steps along `r`."""
    length = power_of_two(extent(q.size))
    rows = min(power_of_two(extent(r.size)), max(1, min(_SHORT_ROWS, _SHORT_STEP // length)))
    return Config(((r.name, rows), (q.name, length)), num_warps=min(16, warps_for(rows * length, _SHORT_EACH)))
