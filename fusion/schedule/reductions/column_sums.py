"""Finds sums of columns that one kernel can compute with folds of the rows (`clusters/legality/rows_and_columns.py`).

Input: a program; output: for such a sum the axis of the rows and the number of parts.  On a GPU each multiprocessor has
two programs that hold one row after another: one computes while the other waits, and more parts have more partial sums
to store.  On a CPU the rows of a part stay in the cache until their columns are summed.  Whether the two become one
kernel is decided later, by its price (`clusters/growth.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.ir.program import Axis, Program, Reduce
from fusion.lowering.ir.sizes import estimate
from fusion.schedule.iteration.contiguity import reads_contiguously
from fusion.schedule.iteration.dependences import read_through_maps
from fusion.schedule.reductions.divisors import even_parts, fitting_divisor
from fusion.schedule.reductions.flat import flattened

_LEAST_ROWS = 16
"""Rows of a part that are held one by one, below which partial sums move about as many bytes as the rows."""

_PROGRAMS = 2
"""Programs of a multiprocessor, if their parts are long enough (docs/performance.md, `forms.rows._HELD_WARPS`)."""

_FEWEST_TOGETHER = 8
"""Rows of a part that caches hold, below which partial sums move about as many bytes as the rows."""

_LEAST_ROW = 256
"""Elements of a row below which a program holds several rows, and has no part of its own for long."""


def column_sums(
    program: Program, capabilities: Capabilities, hints: Mapping[sympy.Symbol, int]
) -> Mapping[int, tuple[Reduce, Axis, int]]:
    """Return the column sums of matrices whose rows are folded, too.

    Node → its sum over flat axes, the axis to split, the number of parts.

    Args:
        hints: the values of symbolic sizes when the graph was traced.
    """
    if not capabilities.held_row:
        return {}
    matrices = read_through_maps(program)
    folds = [(node, matrices[p]) for p, node in enumerate(program.nodes) if isinstance(node, Reduce)]
    splits: dict[int, tuple[Reduce, Axis, int]] = {}
    for position, node in enumerate(program.nodes):
        if not isinstance(node, Reduce) or node.op != "sum" or reads_contiguously(program, node, node.over):
            continue
        if not all(axis.size.is_Integer for axis in node.axes):
            continue
        width, rows = (math.prod(estimate(axis.size, hints) for axis in axes) for axes in (node.axes, node.over))
        if not _LEAST_ROW <= width <= capabilities.held_row:
            continue
        common = set[str]().union(*(read & matrices[position] for other, read in folds if _folds_rows_of(other, node)))
        if common:
            flat = flattened(program, node)
            axis = max(flat.over, key=lambda each: estimate(each.size, hints))
            row = int(width) * max(program.buffers[name].dtype.itemsize for name in common)
            count = _parts(flat, axis, row, int(rows), capabilities)
            if count > 1:
                splits[position] = (flat, axis, count)
    return splits


def _parts(node: Reduce, axis: Axis, row: int, rows: int, capabilities: Capabilities) -> int:
    """Return the number of parts of the rows along `axis`, each of `row` bytes; 0 if there are too few rows."""
    slots, length = capabilities.multiprocessors, int(axis.size) if axis.size.is_Integer else 0
    if capabilities.held_part:
        each = capabilities.held_part // row
        wanted = -(-rows // each) if each >= _FEWEST_TOGETHER else 0
        return (fitting_divisor(node, axis, wanted) or wanted) if wanted >= _PROGRAMS * capabilities.parallelism else 0
    if rows < _LEAST_ROWS * slots:
        return 0
    most = min(_PROGRAMS, rows // (_LEAST_ROWS * slots))
    counts = [each * slots for each in range(most, 0, -1)]
    return next(filter(None, (even_parts(length, count) for count in counts if length)), counts[0])


def _folds_rows_of(other: Reduce, node: Reduce) -> bool:
    """Return whether `other` folds as many rows, as long, as `node` adds."""
    sides = [math.prod(axis.size for axis in axes) for axes in (other.axes, other.over, node.over, node.axes)]
    return sides[:2] == sides[2:]
