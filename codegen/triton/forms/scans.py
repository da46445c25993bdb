"""Generates scans: rows or columns whose running sums (or maxima, products) are stored."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from fusion.codegen.triton.blocks import Config, Dim, extent, power_of_two
from fusion.codegen.triton.forms.form import Refused, Task
from fusion.codegen.triton.forms.rows import Rows, scans, step_warps
from fusion.codegen.triton.forms.traffic import SECTOR, narrowest
from fusion.lowering.ir.kernel import Role


@dataclass(frozen=True)
class Scans(Rows):
    """The plan for a kernel that scans, in larger blocks than folds, because each block waits for the one before it."""

    name = "scan"

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept any kernel without contraction that scans more than one element."""
        if task.blocked.contraction or all(dim.role is Role.GRID for dim in task.blocked.dims):
            return Refused("it multiplies matrices, or scans single elements")
        return cls(task) if scans(task.blocked) else Refused("it scans nothing")

    def splits(self, r: Dim, block: int) -> bool:
        """Return False: a scan has no separate loop for the end of a row."""
        return False

    def steps(self, r: Dim, length: int, rows: int) -> tuple[int, int]:
        """Return the elements and warps of each step along a row."""
        warps = step_warps(length)
        return warps * 1024, warps

    def columns(self, r: Dim, x: Dim, times: int) -> Config:
        """Return blocks of many rows and few columns, since each block of rows waits for the one before it."""
        length = power_of_two(extent(r.size))
        if length < 256:
            return super().columns(r, x, times)
        block = min(max(1, SECTOR // narrowest(self.blocked)), power_of_two(extent(x.size)))
        steps = length if r.role is Role.WHOLE else 256
        return Config((("r", steps), ("x", block)), num_warps=max(4, steps * block // 1024))
