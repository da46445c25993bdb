"""Splits totals into a sum per row, where they need other folds of the same rows.

The sum of a divergence over all rows and classes needs, at each point, the maximum and the sum of its row.  In parts of
any other length it is a separate kernel, which reads everything again; row by row it is one more fold of the kernel
that folds the rows (`split.py` makes the parts).

Input: a program; output: for such a sum the axis of the rows, whose number is the number of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.ir.program import Axis, Program, Reduce
from fusion.lowering.ir.sizes import estimate
from fusion.schedule.iteration.contiguity import contiguous_axes
from fusion.schedule.iteration.dependences import read_through_maps

_LEAST_ROW = 256
"""Elements of a row below which its sum is not worth a number in memory."""


def row_totals(
    program: Program, capabilities: Capabilities, hints: Mapping[sympy.Symbol, int]
) -> Mapping[int, tuple[Reduce, Axis, int]]:
    """Return the sums over rows and columns that read folds of the rows, each with the axis to split, and its parts.

    Args:
        hints: the values of symbolic sizes when the graph was traced.
    """
    if not capabilities.held_row:
        return {}
    folds = [node for node in program.nodes if isinstance(node, Reduce)]
    tensors = read_through_maps(program)
    splits: dict[int, tuple[Reduce, Axis, int]] = {}
    for position, node in enumerate(program.nodes):
        if not isinstance(node, Reduce) or node.op != "sum" or node.axes or len(node.over) != 2:
            continue
        along = contiguous_axes(program, node, node.over)
        rows = [axis for axis in node.over if axis not in along]
        if len(rows) != 1 or not rows[0].size.is_Integer:
            continue
        (row,), (column,) = rows, [axis for axis in node.over if axis is not rows[0]]
        count = estimate(row.size, hints)
        if count < capabilities.parallelism or estimate(column.size, hints) < _LEAST_ROW:
            continue
        if any(other.out in tensors[position] and _folds(other, row, column) for other in folds):
            splits[position] = (node, row, count)
    return splits


def _folds(node: Reduce, row: Axis, column: Axis) -> bool:
    """Return whether a reduction folds each row."""
    rows, columns = (math.prod(axis.size for axis in axes) for axes in (node.axes, node.over))
    return bool(rows == row.size and columns == column.size)
