"""Decides which rows are fetched ahead, into the cache, while the row before them is computed.

A program that reads its row in several sweeps waits for memory in the first and for arithmetic in the others; the
processor's own prefetching follows the loop that runs and stops where it ends.  The second sweep over a row therefore
fetches the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import sympy

from fusion.codegen.c.plan.sweeps import Sweep
from fusion.lowering.expr import Expr, Load, loads
from fusion.lowering.indexing import coefficient
from fusion.lowering.kernel import Kernel, KernelAxis, Role

LINE = 64
"""Bytes of a cache line."""

LONGEST = 1 << 17
"""The most bytes of a row whose successor is fetched: both stay in the L2 cache."""


LEAST = 1 << 20
"""The least bytes of a tensor whose rows are fetched ahead: a smaller one is in the L2 cache already."""


def rows_ahead(kernel: Kernel, sweep: Sweep, earlier: Sequence[Sweep], lane: KernelAxis) -> dict[Load, sympy.Expr]:
    """Return the loads of a sweep whose next row it fetches → the offset at which that row starts.

    Args:
        earlier: the sweeps of the kernel before this one.
        lane: the axis along a row.
    """
    grid = kernel.with_role(Role.GRID)
    if not earlier or not grid:
        return {}
    row, along = grid[-1].symbol, lane.symbol  # programs of one thread follow each other along the last axis
    others = {axis.symbol for axis in sweep.axes} - {along}
    counts = Counter(load for each in earlier for load in {*loads(*each.roots)})
    ahead = {}
    for load in loads(*sweep.roots):
        index = load.index[0]
        if counts[load] != 1 or load.mask is not None or isinstance(index, Expr) or others & index.free_symbols:
            continue
        size, step = prod(kernel.param(load.buffer).shape) * load.dtype.itemsize, coefficient(index, row)
        if sympy.sympify(size).is_Integer and size < LEAST:
            continue
        if step is not None and coefficient(index, along) == 1 and _are_apart(step, lane.size, load.dtype.itemsize):
            ahead[load] = index.subs({row: row + 1, along: 0})
    return ahead


def _are_apart(step: sympy.Expr, length: sympy.Expr, itemsize: int) -> bool:
    """Return whether rows that start `step` elements apart do not overlap, and two of them fit the cache."""
    fit = not length.is_Integer or bool(length * itemsize <= LONGEST)
    return fit and bool((step - length).is_nonnegative)
