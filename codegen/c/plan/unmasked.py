"""Decides which loads under a condition need no mask: the condition is the same in all lanes, and other memory is safe.

Compilers load the neighbours that lanes with a stride read (both elements of a pair) as whole vectors, but not under a
mask: then each lane is loaded by itself.  Where one condition holds for all lanes or for none, as on the sides of a
concatenation of channels, the load can go ahead in either case if its base is moved to the start of the tensor where
the condition is false; what is read there is not used.

Input: a kernel, one of its sweeps, and the innermost loop's axis; output: such loads.
"""

from __future__ import annotations

import sympy

from fusion.codegen.c.plan.sweeps import Sweep
from fusion.codegen.c.text.values import MOST_APART
from fusion.lowering.expr import Expr, Load, loads
from fusion.lowering.indexing import coefficient
from fusion.lowering.kernel import Kernel, KernelAxis, Spans


def unmasked(kernel: Kernel, sweep: Sweep, lane: KernelAxis, where: Spans) -> frozenset[Load]:
    """Return the loads of a sweep that need no mask in the lanes along `lane`."""
    return frozenset(load for load in loads(*sweep.roots) if _is_safe(load, kernel, lane, where))


def _is_safe(load: Load, kernel: Kernel, lane: KernelAxis, where: Spans) -> bool:
    """Return whether a load under a mask, with a stride between lanes, may read the start of its tensor instead."""
    index, tensor = load.index[0], kernel.param(load.buffer)
    if load.mask is None or isinstance(index, Expr) or tensor.written or lane.symbol in where[load.mask]:
        return False
    step = coefficient(index, lane.symbol)
    if step is None or not step.is_Integer or not 1 <= step <= MOST_APART:
        return False
    farthest = step * lane.size  # less than a step of the base is left in the lanes
    return bool(sympy.Lt(farthest, tensor.extent) == sympy.true)


__all__ = ["unmasked"]
