"""Chooses the blocks of kernels that fold columns: neighbouring threads take neighbouring columns.

A program takes a step of some rows down its columns at a time.  Input: a kernel whose GRID axis is contiguous; output:
its default configuration.  The numbers were measured on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusion.codegen.triton.blocks import Blocked, Config, Dim, extent, power_of_two
from fusion.codegen.triton.blocks.contiguous import direct_loads, is_crossed
from fusion.codegen.triton.blocks.dims import WORD
from fusion.codegen.triton.blocks.rows import starts_at_words
from fusion.codegen.triton.devices import Device
from fusion.codegen.triton.fixed_order import MOST_HELD, STEP
from fusion.codegen.triton.forms.traffic import MOST_IN_WARP, SECTOR, narrowest, row_loads, streams, warps_for, widest
from fusion.lowering.ir.expr import Expr, free_axes, loads
from fusion.lowering.ir.kernel import Fold, Loop, Role, statements, values_of

_COLUMN_BYTES, _STEP_BYTES = 128, 8192
"""Bytes of neighbouring columns, and of a step down them in all tensors.
(measured: docs/performance.md, `_COLUMN_BYTES`)
"""
_COLUMN_THREAD = 128
"""The bytes of columns that one thread folds.  Few warps fold a column, since several have to exchange their sums.
(measured: docs/performance.md, `_COLUMN_THREAD`)
"""
_SHORT_COLUMN = 64
"""Elements of a column up to which its neighbours have `_COLUMN_BYTES`, or more if they are few for a warp."""
_MANY_EACH = 16
"""Elements of a thread, at least, of columns of several tensors.  (measured: docs/performance.md, `_MANY_EACH`)
"""
_STORED_EACH = 8
"""The same where the steps are stored.  (measured: docs/performance.md, `_STORED_EACH`)
"""
_FEW_EACH = 4
"""The same where at least `_MANY_STREAMS` tensors are read or stored, whose addresses take as many registers.
(measured: docs/performance.md, `_FEW_EACH`)
"""
_MANY_STREAMS = 5
_LEAST_IN_ALL = 32
"""Elements of a thread in all steps: fewer do not pay for the exchange between warps at the end of a column.
(measured: docs/performance.md, `_LEAST_IN_ALL`)
"""
_FEW_HELD = 4096
"""Elements of a step where there are fewer programs than multiprocessors.  (measured: docs/performance.md, `_FEW_HELD`)
"""
_GATHERED = 4096
"""Elements of a whole block whose positions are data: they change their layout in shared memory.
(measured: docs/performance.md, `_GATHERED`)
"""
_KEPT = 1.5
"""How often the columns that resident programs read again may fill the second-level cache: programs with more warps are
fewer at a time.  (measured: docs/performance.md, `_KEPT`)
"""
_MANY_VECTORS = 3
"""Loads of one element for each row of a step, from which on steps are wide, so that few threads repeat them."""


@dataclass(frozen=True)
class _Step:
    """A step down columns whose elements are few for a request.

    Attributes:
        columns: neighbouring columns, or fewer where there were too few programs.
        elements: elements of a step, and `each` those of a thread.
        programs: programs for each multiprocessor, at least.
    """

    columns: int
    elements: int
    each: int
    programs: int


_ODD_STEP = _Step(columns=256, elements=1024, each=4, programs=6)
"""The step where rows start off words of 16 bytes.  (measured: docs/performance.md, `_ODD_STEP`)
"""
_PAIRED_STEP = _Step(columns=256, elements=2048, each=8, programs=6)
"""The same for 16-bit floats whose rows start at multiples of 4 bytes: a request is for two of them.
(measured: docs/performance.md, `_PAIRED_STEP`)
"""
_WIDE_STEP = _Step(columns=256, elements=4096, each=32, programs=3)
"""The step with `_MANY_VECTORS`.  (measured: docs/performance.md, `_WIDE_STEP`)
"""


@dataclass(frozen=True)
class Columns:
    """Columns along `x` that are folded along `r`, in `times` parts or matrices."""

    blocked: Blocked
    r: Dim
    x: Dim
    times: int

    def config(self) -> Config:
        """Return the configuration: neighbouring threads take at least 64 bytes of neighbouring columns, or 32 where
        columns are long, or are read across as well.  Few columns get smaller blocks, to fill the device (measured:
        docs/performance.md, `columns`).
        """
        if self.blocked.invariant:
            return self._in_fixed_order()
        if (step := self._special) is not None:
            columns = self._filling(min(step.columns, self._columns))
            rows = min(self._length, max(1, step.elements // columns))
            return self._blocks(rows, columns, warps_for(rows * columns, step.each))
        columns, device = self._filling(self._neighbours()), self.blocked.device
        programs = self._programs(columns)
        few = programs < device.multiprocessors  # nothing else hides their latency
        held = _FEW_HELD if few else self._step()
        rows = self._length if self._is_whole else min(self._length, power_of_two(max(1, held // columns)))
        warps = min(16, warps_for(rows * columns, _MANY_EACH if few else self._each()))
        if not self._is_whole and not few:
            warps = min(warps, warps_for(self._length * columns, _LEAST_IN_ALL))
        if not self._is_whole and reads_again(self.blocked):
            read_again = extent(self.r.size) * columns * widest(self.blocked)
            while warps < 16 and _resident(device, programs, warps) * read_again > _KEPT * device.cache:
                warps *= 2
        return self._blocks(rows, columns, warps)

    @property
    def _is_whole(self) -> bool:
        return self.r.role is Role.WHOLE

    @cached_property
    def _sums(self) -> int:
        """The most folds of one loop, each of which holds as many numbers as a step has elements."""
        loops = [stmt for stmt in self.blocked.body if isinstance(stmt, Loop)]
        return max((sum(1 for _ in statements(loop.body, Fold)) for loop in loops), default=1)

    @property
    def _columns(self) -> int:
        return power_of_two(extent(self.x.size))

    @property
    def _length(self) -> int:
        return power_of_two(extent(self.r.size))

    def _blocks(self, rows: int, columns: int, warps: int) -> Config:
        return Config((("r", rows), ("x", columns)), num_warps=warps)

    def _programs(self, columns: int) -> int:
        return -(-extent(self.x.size) // columns) * self.times

    @cached_property
    def _special(self) -> _Step | None:
        """Return the step of columns in loops that read many vectors, or whose rows start off words of 16 bytes."""
        if self._is_whole:
            return None
        every = set(loads(*(value for stmt in statements(self.blocked.body) for value in values_of(stmt))))
        dims = [free_axes(load) for load in every]
        if sum(self.r.symbol in each and self.x.symbol not in each for each in dims) >= _MANY_VECTORS:
            return _WIDE_STEP
        if self._starts_at(WORD):
            return None
        return _PAIRED_STEP if widest(self.blocked) == 2 and self._starts_at(4) else _ODD_STEP

    def _starts_at(self, size: int) -> bool:
        """Return whether the rows along the columns start at multiples of so many bytes, in every large tensor."""
        kernel, along = self.blocked.kernel, {axis.symbol for axis in self.x.axes}
        large, rows = {param.name for param in streams(self.blocked)}, {axis.symbol for axis in self.r.axes}
        return all(
            starts_at_words(kernel, name, offset, rows & offset.free_symbols, size)
            for name, offset in direct_loads(kernel)
            if name in large and along & offset.free_symbols and rows & offset.free_symbols
        )

    def _filling(self, columns: int) -> int:
        """Return a block of as many columns, or of fewer that give work to all multiprocessors."""
        count = self.blocked.device.multiprocessors
        each = 2 if self._special is None else self._special.programs
        while columns > 32 and self._programs(columns) < each * count:
            columns //= 2
        while columns > SECTOR // narrowest(self.blocked) and self._programs(columns) < count // 4:
            columns //= 2
        return columns

    def _neighbours(self) -> int:
        """Return the neighbouring columns that a program should take."""
        wanted, length = _COLUMN_BYTES // widest(self.blocked), self._length
        if self._is_whole:
            wanted = max(wanted, MOST_IN_WARP // length) if length <= _SHORT_COLUMN else 4096 // length
        crossed = self._is_whole and (length > 512 or is_crossed(self.blocked.kernel, self.x, (self.r,)))
        if crossed and self._gathers():
            return min(max(1, _GATHERED // length), self._columns)
        return min(max(SECTOR // narrowest(self.blocked) if crossed else 32, min(1024, wanted)), self._columns)

    def _gathers(self) -> bool:
        """Return whether positions that are data vary along both axes of a block."""
        block = {self.r.symbol, self.x.symbol}
        every = loads(*(value for stmt in statements(self.blocked.body) for value in values_of(stmt)))
        positions = (load.index[0] for load in every if isinstance(load.index[0], Expr))
        return any(block <= free_axes(read) for position in positions for read in loads(position))

    def _step(self) -> int:
        """Return the elements of a step: a second sum takes as many registers as half of a step of 16-bit floats."""
        count, size = len(streams(self.blocked)), widest(self.blocked)
        elements = _STEP_BYTES // (count * size)
        if self._writes:
            return elements // 2 if count >= _MANY_STREAMS else elements
        return elements // 2 if self._sums > 1 and count == 1 and size == 2 else elements

    @property
    def _writes(self) -> bool:
        return any(param.written for param in streams(self.blocked))

    def _each(self) -> int:
        """Return how many of the elements of a block, or of a step, a thread takes."""
        folds, loaded = list(statements(self.blocked.body, Fold)), row_loads(self.blocked, self.r)
        if self._is_whole:  # not the rows' positions, if these are data
            loaded = [load for load in loaded if self.x.symbol in free_axes(load)]
        tiles = max(1, len(loaded))
        if self._is_whole or (len(folds) == tiles == 1 and not self._writes):
            return max(_MANY_EACH, _COLUMN_THREAD // (widest(self.blocked) * tiles))
        if self._writes:
            return _FEW_EACH if len(streams(self.blocked)) >= _MANY_STREAMS else _STORED_EACH
        if self._sums > 1 and widest(self.blocked) == 2:
            return _MANY_EACH
        return max(_MANY_EACH, _COLUMN_THREAD // (2 * widest(self.blocked))) if tiles == 1 else _MANY_EACH

    def _in_fixed_order(self) -> Config:
        """Return the same for columns in steps of a fixed length (`fixed_order`): 64 bytes of neighbouring columns, or
        32 of long ones.
        """
        steps = STEP if self.r.role is Role.LOOP else self._length
        wanted = max(1, min(2 * SECTOR // narrowest(self.blocked), MOST_HELD // 2 // steps))
        columns = min(max(wanted, SECTOR // narrowest(self.blocked) // 2), self._columns)
        return self._blocks(steps, columns, min(32, warps_for(steps * columns, 16)))


def reads_again(blocked: Blocked) -> bool:
    """Return whether a later loop reads the data of an earlier one again, over tensors few enough for the registers."""
    loops = [stmt for stmt in blocked.body if isinstance(stmt, Loop)]
    return len(loops) > 1 and len(streams(blocked)) <= 3


def _resident(device: Device, programs: int, warps: int) -> int:
    """Return how many of the programs run at a time, if only their warps limit them."""
    return min(programs, device.multiprocessors * max(1, device.warps // warps))
