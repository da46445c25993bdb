"""Generates kernels that fold rows or columns, and multiply no matrices.

Short rows have a warp each, long ones a few dozen elements per thread; rows that a program cannot hold are folded in
steps.  Where the GRID axis is contiguous, neighbouring threads take neighbouring columns.  The numbers were measured on
an H200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import Self

from fusion.codegen.triton.blocks import Blocked, Config, Dim, extent, power_of_two
from fusion.codegen.triton.blocks.contiguous import direct_loads, is_crossed
from fusion.codegen.triton.blocks.dims import WORD
from fusion.codegen.triton.blocks.rows import starts_at_words
from fusion.codegen.triton.devices import Device
from fusion.codegen.triton.fixed_order import MOST_HELD, STEP
from fusion.codegen.triton.forms import limits
from fusion.codegen.triton.forms.form import Form, Refused, Task
from fusion.codegen.triton.forms.traffic import (
    SECTOR,
    bytes_of_row,
    narrowest,
    neighbours,
    row_loads,
    streams,
    warps_for,
    widest,
)
from fusion.lowering.ir.kernel import Fold, Loop, Prefix, Role, Store, statements
from fusion.lowering.ir.scalar_ops import EXTREMES, HALVES

_LEAST_SPLIT = 4
"""Blocks of a row that are worth two loops instead of one."""

_FLOOR, _MOST_IN_WARP = 3072, 2048
"""Bytes that a program moves so that memory, rather than the rate at which programs start, bounds many short rows; and
the padded elements of them that one warp holds.  (measured: docs/performance.md, `_FLOOR`)
"""
_LONG_ENOUGH = 16
"""Programs per multiprocessor that such rows still have."""
_PLACED = 4
"""The factor of the warps of a row without positions of extremes to those of one with: each exchange between warps has
two values, and compares them.  (measured: docs/performance.md, `_PLACED`)
"""

_COLUMN_BYTES, _STEP_BYTES = 128, 8192
"""Bytes of neighbouring columns, and of a step down them in all tensors.
(measured: docs/performance.md, `_COLUMN_BYTES`)
"""
_COLUMN_THREAD = 128
"""Bytes of the elements of a thread of columns, which few warps fold: those of several exchange their sums.
(measured: docs/performance.md, `_COLUMN_THREAD`)
"""
_SHORT_COLUMN = 64
"""Elements of a column up to which its neighbours have `_COLUMN_BYTES`, or more if they are few for a warp."""
_MANY_EACH = 16
"""Elements of a thread, at least, of columns of several tensors.  (measured: docs/performance.md, `_MANY_EACH`)
"""
_FEW_HELD = 4096
"""Elements of a step where there are fewer programs than multiprocessors.  (measured: docs/performance.md, `_FEW_HELD`)
"""
_KEPT = 1.5
"""How often the columns that resident programs read again may fill the second-level cache: programs with more warps are
fewer at a time.  (measured: docs/performance.md, `_KEPT`)
"""
_ODD_BLOCK, _ODD_STEP, _ODD_EACH = 256, 1024, 4
"""Columns, elements and elements per thread of a step down columns whose rows start off words of 16 bytes.
(measured: docs/performance.md, `_ODD_BLOCK`)
"""

_ROW_WARPS = {1024: 2, 2048: 2, 4096: 8, 8192: 8, 16384: 16}  # padded length of a row held whole → warps; above: 32

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

_HELD_ELEMENTS, _HELD_TILES, _HELD_STAGES = 32, 4, 3
"""For rows that are held together with sums of their columns: elements per thread, with at most `_HELD_TILES` sums and
operands, and pipeline stages."""


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

        A multiprocessor has one program, whose registers hold the sums and the operands of some rows; loads of the next
        rows are in flight (measured: docs/performance.md, `rows`).
        """
        folds = [stmt for stmt in statements(self.blocked.body, Fold) if self.blocked.of(stmt.over) == (r,)]
        tiles = len(folds) + len(limits.in_flight(self.blocked))
        length = power_of_two(extent(q.size))
        each = _HELD_ELEMENTS // power_of_two(-(-tiles // _HELD_TILES))
        warps = max(8, length // (each * self.blocked.device.warp))
        rows = max(1, min(8 * each * self.blocked.device.warp // length, power_of_two(extent(r.size))))
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
        return Config((("r", length),), num_warps=warps)

    def _rows_per_warp(self, r: Dim, length: int, rows: int) -> int:
        """Return how many rows a program of one warp computes, so that many short rows are few programs."""
        least, most = _FLOOR / max(1, bytes_of_row(self.blocked, r)), _MOST_IN_WARP // length
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
        if length > 2 * _ALONE[0] and _reads_again(blocked):
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
        """Return the configuration for a contiguous GRID axis: neighbouring threads take at least 64 bytes of
        neighbouring columns, or 32 where columns are long, or are read across as well.

        Each block is computed `times` times.  Few columns get smaller blocks, to fill the device (measured:
        docs/performance.md, `rows`).
        """
        blocked, columns, length = self.blocked, extent(x.size), power_of_two(extent(r.size))
        if blocked.invariant:
            return self._fixed_columns(r, columns)
        is_odd = r.role is not Role.WHOLE and not self._reads_words(r, x)
        is_narrow = r.role is Role.WHOLE and (length > 512 or is_crossed(blocked.kernel, x, (r,)))
        least = SECTOR // narrowest(blocked) if is_narrow else 32
        block = min(max(least, self._neighbours(r, length, is_odd=is_odd)), power_of_two(columns))
        while block > 32 and -(-columns // block) * times < 2 * blocked.device.multiprocessors:
            block //= 2
        while (
            block > SECTOR // narrowest(blocked) and -(-columns // block) * times < blocked.device.multiprocessors // 4
        ):
            block //= 2
        if is_odd:
            steps = min(length, max(1, _ODD_STEP // block))
            return Config((("r", steps), ("x", block)), num_warps=warps_for(steps * block, _ODD_EACH))
        programs = -(-columns // block) * times
        few = programs < blocked.device.multiprocessors  # nothing else hides their latency
        held = _FEW_HELD if few else _STEP_BYTES // (len(streams(blocked)) * widest(blocked))
        steps = length if r.role is Role.WHOLE else min(length, power_of_two(max(1, held // block)))
        warps = min(16, warps_for(steps * block, _MANY_EACH if few else self._each(r)))
        if r.role is not Role.WHOLE and _reads_again(blocked):
            read_again = extent(r.size) * block * widest(blocked)
            while warps < 16 and _resident(blocked.device, programs, warps) * read_again > _KEPT * blocked.device.cache:
                warps *= 2
        return Config((("r", steps), ("x", block)), num_warps=warps)

    def _neighbours(self, r: Dim, length: int, *, is_odd: bool) -> int:
        """Return the neighbouring columns that a program should take."""
        if is_odd:
            return _ODD_BLOCK
        wanted = _COLUMN_BYTES // widest(self.blocked)
        if r.role is not Role.WHOLE:
            return wanted
        return min(1024, max(wanted, _MOST_IN_WARP // length) if length <= _SHORT_COLUMN else 4096 // length)

    def _each(self, r: Dim) -> int:
        """Return how many of the elements of a block, or of a step, a thread takes."""
        folds, tiles = list(statements(self.blocked.body, Fold)), max(1, len(row_loads(self.blocked, r)))
        writes = any(param.written for param in streams(self.blocked))
        if r.role is Role.WHOLE or (len(folds) == tiles == 1 and not writes):
            return max(_MANY_EACH, _COLUMN_THREAD // (widest(self.blocked) * tiles))
        return max(_MANY_EACH, _COLUMN_THREAD // (2 * widest(self.blocked))) if tiles == 1 else _MANY_EACH

    def _fixed_columns(self, r: Dim, columns: int) -> Config:
        """Return the same for columns in steps of a fixed length (`fixed_order`): 64 bytes of neighbouring columns, or
        32 of long ones.
        """
        steps = STEP if r.role is Role.LOOP else power_of_two(extent(r.size))
        wanted = max(1, min(2 * SECTOR // narrowest(self.blocked), MOST_HELD // 2 // steps))
        block = min(max(wanted, SECTOR // narrowest(self.blocked) // 2), power_of_two(columns))
        return Config((("r", steps), ("x", block)), num_warps=min(32, warps_for(steps * block, 16)))

    def _reads_words(self, r: Dim, x: Dim) -> bool:
        """Return whether the rows along the columns start at multiples of 16 bytes, in every large tensor."""
        kernel, along = self.blocked.kernel, {axis.symbol for axis in x.axes}
        large, rows = {param.name for param in streams(self.blocked)}, {axis.symbol for axis in r.axes}
        return all(
            starts_at_words(kernel, name, offset, rows & offset.free_symbols)
            for name, offset in direct_loads(kernel)
            if name in large and along & offset.free_symbols and rows & offset.free_symbols
        )


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


def _reads_again(blocked: Blocked) -> bool:
    """Return whether a later loop reads the data of an earlier one again, over tensors few enough for the registers."""
    loops = [stmt for stmt in blocked.body if isinstance(stmt, Loop)]
    return len(loops) > 1 and len(streams(blocked)) <= 3


def _resident(device: Device, programs: int, warps: int) -> int:
    """Return how many of the programs run at a time, if only their warps limit them."""
    return min(programs, device.multiprocessors * max(1, device.warps // warps))


def _several(reduced: list[Dim]) -> Config:
    """Return a configuration for folds over different axes: a full tile per program, with loops in steps that keep it
    small.
    """
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
