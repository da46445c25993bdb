"""Finds sums of columns that one kernel can compute with folds of the rows (`clusters/legality/rows_and_columns.py`).

Input: a program; output: for such a sum the axis of the rows and the number of parts, so that each multiprocessor has
two programs that hold one row after another: one computes while the other waits, and more parts have more partial sums
to store.  Whether the two become one kernel is decided later, by its price (`clusters/growth.py`).
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
from fusion.schedule.reductions.flat import flattened

_LEAST_ROWS = 16
"""Rows of a part below which partial sums move about as many bytes as the rows."""

_BUSY = 0.9
"""The least share of busy multiprocessors that is worth parts of equal length, which need no conditions."""

_PROGRAMS = 2
"""Programs of a multiprocessor, if their parts are long enough (docs/performance.md, `forms.rows._HELD_WARPS`)."""

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
    slots = capabilities.multiprocessors
    if not capabilities.held_row:
        return {}
    matrices = read_through_maps(program)
    folds = [(node, matrices[p]) for p, node in enumerate(program.nodes) if isinstance(node, Reduce)]
    splits: dict[int, tuple[Reduce, Axis, int]] = {}
    for position, node in enumerate(program.nodes):
        if not isinstance(node, Reduce) or node.op != "sum" or reads_contiguously(program, node, node.over):
            continue
        width, rows = (math.prod(estimate(axis.size, hints) for axis in axes) for axes in (node.axes, node.over))
        if not _LEAST_ROW <= width <= capabilities.held_row or rows < _LEAST_ROWS * slots:
            continue
        if any(_folds_rows_of(other, node) and read & matrices[position] for other, read in folds):
            flat = flattened(program, node)
            axis = max(flat.over, key=lambda each: estimate(each.size, hints))
            most = min(_PROGRAMS, int(rows // (_LEAST_ROWS * slots)))
            counts = [each * slots for each in range(most, 0, -1)]
            even = [even_parts(int(axis.size), count) for count in counts] if axis.size.is_Integer else []
            splits[position] = (flat, axis, next(filter(None, even), counts[0]))
    return splits


def _folds_rows_of(other: Reduce, node: Reduce) -> bool:
    """Return whether `other` folds as many rows, as long, as `node` adds."""
    sides = [math.prod(axis.size for axis in axes) for axes in (other.axes, other.over, node.over, node.axes)]
    return sides[:2] == sides[2:]


def even_parts(length: int, slots: int) -> int | None:
    """Return the divisor of `length` with which parts, at most two to a slot, keep most slots busy; None if none does.

    >>> even_parts(8192, 132), even_parts(8000, 132), even_parts(12608, 132)
    (128, 125, None)
    """
    busy = {count: count / (slots * -(-count // slots)) for count in range(2, 2 * slots + 1) if length % count == 0}
    best = max(busy, key=lambda count: (busy[count], -count), default=None)
    return best if best is not None and busy[best] >= _BUSY else None
