"""Unrolls a very short axis that another one continues in memory, so that lanes are full.

The last axis of a pair of halves that are stacked, of unpacked 4-bit numbers or of complex numbers has two points.
Lanes along it would be two; lanes along the axis before it skip every second element.  One store for each of its points
in one loop over the axis before it writes whole vectors, and what both have in common is computed once.  Input: a
kernel that only stores; output: the kernel without that axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import sympy

from fusion.codegen.c.plan.lanes import accesses, best_axis, continued
from fusion.codegen.c.plan.sweeps import sweeps_of
from fusion.lowering.expr import Expr, postorder
from fusion.lowering.indexing import replace_axes, substitute_all
from fusion.lowering.kernel import Kernel, KernelAxis, Role, Store, spans, values_of, with_values
from fusion.lowering.positions import simplify_all

MOST_NODES = 200
"""Size of the largest unrolled body."""


def with_unrolled_axis(kernel: Kernel) -> Kernel:
    """Write a store for each point of the very short axis that most memory of `kernel` is contiguous along."""
    grid = kernel.with_role(Role.GRID)
    stores = [stmt for stmt in kernel.body if isinstance(stmt, Store) and stmt.axes is None]
    if len(grid) < 2 or len(grid) < len(kernel.axes) or len(stores) < len(kernel.body):
        return kernel
    used = accesses(sweeps_of(kernel), spans(kernel))
    axis = best_axis(grid, used)
    if continued(axis, grid, used) is None:
        return kernel
    if int(axis.size) * len(postorder(*(value for store in stores for value in values_of(store)))) > MOST_NODES:
        return kernel
    body = dict.fromkeys(part for store in stores for part in _parts(store, axis, kernel))
    return replace(kernel, axes=tuple(other for other in kernel.axes if other is not axis), body=tuple(body))


def _parts(store: Store, axis: KernelAxis, kernel: Kernel) -> Iterator[Store]:
    """Yield a store for each point of an axis."""
    sizes = {symbol: size for symbol, size in kernel.axis_sizes().items() if symbol != axis.symbol}
    for number in range(int(axis.size)):
        there = {axis.symbol: sympy.Integer(number)}
        part = with_values(store, simplify_all(substitute_all(values_of(store), there, sizes), sizes))
        if not isinstance(store.offset, Expr):
            part = replace(part, offset=replace_axes(store.offset, there, sizes))
        yield part
