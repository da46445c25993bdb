"""Generates pointwise kernels (maps), which fold nothing and multiply no matrices.

A map has enough 16-byte accesses in flight per thread, and enough programs for every multiprocessor.  Where a load and
the store are contiguous along different axes it computes tiles, so that both sides have rows of 128 bytes.  The numbers
were measured on an H200.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import sympy
from typing_extensions import Self

from fusion.codegen.triton.blocks import Blocked, Config, Dim, extent, power_of_two, row_block
from fusion.codegen.triton.blocks.contiguous import direct_loads
from fusion.codegen.triton.blocks.dims import WORD
from fusion.codegen.triton.forms.form import Form, Refused, Task
from fusion.codegen.triton.forms.traffic import narrowest, neighbours, streams, warps_for, widest
from fusion.lowering.ir.expr import Load, postorder
from fusion.lowering.ir.kernel import Role, statements, values_of


@dataclass(frozen=True)
class Maps(Form):
    """The plan for a kernel whose dimensions are all spread over programs."""

    name = "map"

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept any kernel without contraction, fold and scan."""
        if task.blocked.contraction or any(dim.role is not Role.GRID for dim in task.blocked.dims):
            return Refused("it folds or multiplies")
        return cls(task)

    def configs(self) -> tuple[Config, ...]:
        """Return the default, chosen from sizes alone, and its neighbours."""
        return neighbours(self.blocked, self._default())

    def _default(self) -> Config:
        grid = {dim.name: dim for dim in self.blocked.grid()}
        if "y" in grid:
            return _tile(self.blocked, grid["y"], grid["x"])
        return _by_rows(self.blocked, grid["b"], grid["x"]) if "b" in grid else _pointwise(self.blocked, grid.get("x"))


_WINDOW, _PER_WINDOW = 4, (512, 8)
"""The least points of a window, and the elements and warps of a block of windows.

The points of neighbouring windows start at any address, so that they are loaded one by one: with four windows in a
thread, each load of a warp takes four times the lines that it needs.  (measured: docs/performance.md, `_PER_WINDOW`)
"""


def _pointwise(blocked: Blocked, x: Dim | None) -> Config:
    """Return a configuration with two 16-byte words of every tensor per thread (one, for many tensors), on all
    multiprocessors; with two windows per thread where windows are read.
    """
    if x is None:
        return Config((), num_warps=1)
    elements, points = extent(x.size), _points_read(blocked)
    if points >= _WINDOW and _reads_within_words(blocked):
        block, warps = _PER_WINDOW
        while block > 64 and -(-elements // block) < 4 * blocked.device.multiprocessors:
            block, warps = block // 2, max(1, warps // 2)
        return Config((("x", block),), num_warps=warps)
    block, warps = _line(blocked, elements, max(len(blocked.kernel.params), points))
    return Config((("x", block),), num_warps=warps)


def _points_read(blocked: Blocked) -> int:
    """Return the greatest number of points at which one tensor is read: the points of a window are all in registers at
    once.
    """
    roots = [value for stmt in statements(blocked.body) for value in values_of(stmt)]
    read = Counter(part.buffer for part in postorder(*roots) if isinstance(part, Load))
    return max(read.values(), default=0)


def _reads_within_words(blocked: Blocked) -> bool:
    """Return whether a tensor is read at points whose distance is not a multiple of 16 bytes."""
    first: dict[str, sympy.Expr] = {}
    for name, offset in direct_loads(blocked.kernel):
        apart = (offset - first.setdefault(name, offset)) * blocked.kernel.param(name).dtype.itemsize
        if apart.is_Integer and int(apart) % WORD:
            return True
    return False


def _by_rows(blocked: Blocked, b: Dim, x: Dim) -> Config:
    """Return a configuration with the elements of a linear block, from one row or a few short ones."""
    rows, columns = extent(b.size), extent(x.size)
    block, warps = _line(blocked, rows * columns, len(streams(blocked)))
    held = row_block(x.size, block)
    return Config((("b", min(block // held, power_of_two(rows))), ("x", held)), num_warps=warps)


def _line(blocked: Blocked, size: int, tensors: int) -> tuple[int, int]:
    """Return the elements of a linear block of each of `tensors`, and its warps."""
    per_thread = min(16, 32 // widest(blocked)) if tensors <= 6 else 8
    per_thread = max(per_thread, 4)
    block = 128 * per_thread
    while block > 256 and -(-size // block) < 4 * blocked.device.multiprocessors:
        block //= 2
    each = 4 if block <= 512 else min(per_thread, 8)  # little work: one thread per 16-byte word
    block = min(block, power_of_two(size))
    return block, min(4, warps_for(block, each))


def _tile(blocked: Blocked, y: Dim, x: Dim) -> Config:
    """Return a configuration with rows of 128 bytes on both sides of the transposition."""
    side = 32 if narrowest(blocked) >= 4 else 64
    blocks = (("y", min(side, power_of_two(extent(y.size)))), ("x", min(side, power_of_two(extent(x.size)))))
    return Config(blocks, num_warps=warps_for(blocks[0][1] * blocks[1][1], 8 if side == 32 else 16))
