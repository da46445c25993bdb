"""Writes the prefetches of a sweep: of the next row, and of rows of tables that come later (`plan.prefetch`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy

from fusion.codegen.c.loops.grid import Grid
from fusion.codegen.c.loops.nests import SweepNest
from fusion.codegen.c.plan.lanes import Lanes
from fusion.codegen.c.plan.loop_fusion import Sweep, extend_spans
from fusion.codegen.c.plan.prefetch import CACHE_LINE, Gathered, gathered_ahead, prefetch, rows_ahead, scattered_ahead
from fusion.codegen.c.text.code import SUM
from fusion.codegen.c.text.nest import Extent
from fusion.codegen.c.text.values import ValueWriter
from fusion.lowering.ir.expr import Expr
from fusion.lowering.ir.kernel import Kernel, Role


class Fetches:
    """The prefetches of one kernel."""

    def __init__(
        self,
        kernel: Kernel,
        lanes: Lanes,
        grid: Grid,
        where: dict[Expr, frozenset[sympy.Symbol]],
        writer: ValueWriter,
        params: Mapping[str, str],
    ) -> None:
        """Take `where`, the axes along which each value varies; positions to fetch are added to it."""
        self._kernel, self._lanes, self._grid = kernel, lanes, grid
        self._where, self._writer, self._params = where, writer, params

    def write(self, sweep: Sweep, nest: SweepNest, earlier: Sequence[Sweep]) -> None:
        """Add the prefetches of a sweep to its loops; `earlier`: the sweeps before it."""
        self._next_row(sweep, nest, earlier)
        self._gathered(sweep, nest, earlier)
        self._scattered(sweep, nest)

    def _next_row(self, sweep: Sweep, nest: SweepNest, earlier: Sequence[Sweep]) -> None:
        """Fetch the next row, in steps, where a sweep reads the current one again."""
        if nest.steps is None or nest.lane is None or nest.runs.shares is None or self._lanes.axis is not None:
            return
        level, start = nest.steps
        for load, offset in rows_ahead(self._kernel, sweep, earlier, nest.lane).items():
            first = f"{self._params[load.buffer]} + {self._writer.position(offset)} + {start}"
            level.before.append(prefetch(first, nest.runs.shares, load.dtype.itemsize))

    def _gathered(self, sweep: Sweep, nest: SweepNest, earlier: Sequence[Sweep]) -> None:
        """Fetch the rows of tables that later programs read."""
        lanes, grid = self._lanes, [axis for axis in self._kernel.with_role(Role.GRID) if axis is not self._lanes.axis]
        if nest.lane is None or lanes.block is not None or lanes.tile is not None or not grid:
            return
        for row in gathered_ahead(self._kernel, sweep, earlier, nest.lane, grid[-1]):
            self._row(row, nest)

    def _scattered(self, sweep: Sweep, nest: SweepNest) -> None:
        """Fetch the rows of tables that later iterations update."""
        lane = nest.lane
        if lane is None or self._lanes.tile is not None or not nest.lanes_are_innermost:
            return
        lanes = self._grid.extents[lane.symbol]
        for axis in sweep.axes:
            if nest.depth[axis.symbol] == len(nest.levels) - 2:
                for row in scattered_ahead(self._kernel, sweep, lane, axis, lanes.number):
                    self._row(row, nest, lanes)

    def _row(self, row: Gathered, nest: SweepNest, lanes: Extent | None = None) -> None:
        """Fetch a row, or its part in `lanes`."""
        extend_spans(self._where, [row.position])
        (first,) = self._writer.write([row.position])
        depth = max((nest.depth.get(axis, 0) for axis in self._where[row.position]), default=0)
        address, itemsize = (
            f"{self._params[row.buffer]} + {first.at(SUM)}",
            self._kernel.param(row.buffer).dtype.itemsize,
        )
        count: int | str = row.lines * CACHE_LINE // itemsize
        if lanes is not None and not lanes.filled:
            count = f"imin({count}, {lanes.end} - {lanes.start})"
        if lanes is not None and lanes.start != "0":
            address += f" + {lanes.start}"
        nest.levels[depth].before.append(prefetch(address, count, itemsize))


__all__ = ["Fetches"]
