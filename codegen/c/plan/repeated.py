"""Decides which axes of a grid become loops inside a program: short ones, along which most of the work is the same.

A kernel that only stores has all its axes in its grid, with lanes along the last one, and computes values that vary
along fewer axes once for all these lanes, sequentially.  If these values are most of its work, as in small matrices
whose elements each select one of the results of a long elimination, a program computes a whole matrix, and these
results once; lanes may run along the remaining grid, many matrices at a time.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from fusion.codegen.c.plan.threads import cost_of
from fusion.lowering.ir.expr import postorder
from fusion.lowering.ir.kernel import Kernel, Role, Store, spans

UNROLLED = 4
"""Iterations of a loop that a C compiler unrolls, and then eliminates common subexpressions of."""

MOST_MATRIX_POINTS = 64
"""The most points of a matrix in one program: results of a block of programs stay in the L1 cache."""

FEWEST_MATRICES = 16
"""The number of matrices that fill lanes."""


def with_inner_axes(kernel: Kernel) -> Kernel:
    """Move all axes but the first into the programs of `kernel` if most of its work does not vary along them all."""
    first, *inner = kernel.with_role(Role.GRID) or (None,)
    sizes = [axis.size for axis in inner]
    plain = all(isinstance(stmt, Store) and stmt.axes is None for stmt in kernel.body)
    if first is None or not plain or not all(size.is_Integer for size in sizes):
        return kernel
    lanes_fill = not first.size.is_Integer or first.size >= FEWEST_MATRICES
    if not lanes_fill or sympy.Mul(*sizes[:-1]) <= UNROLLED or sympy.Mul(*sizes) > MOST_MATRIX_POINTS:
        return kernel
    spans_of, within = spans(kernel), {axis.symbol for axis in inner}
    same = other = 0
    for node in postorder(*(stmt.value for stmt in kernel.body if isinstance(stmt, Store))):
        if within <= spans_of[node]:
            other += cost_of(node)
        else:
            same += cost_of(node)
    if same < other:
        return kernel
    axes = (replace(axis, role=Role.WHOLE) if axis in inner else axis for axis in kernel.axes)
    return replace(kernel, axes=tuple(axes))
