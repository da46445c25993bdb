"""Removes masks from loads whose condition holds for all lanes or for none, as in a concatenation of channels.

- A choice between elements of one tensor is an element at a chosen position: one load instead of several.
- Other such loads need no mask: where the condition is false they read the start of the tensor, and the value is not
  used.  Compilers load the neighbours that lanes with a stride read (both elements of a pair) as whole vectors, but
  not under a mask; and a masked load of an unmapped page takes hundreds of cycles.

Input: a kernel, one of its sweeps, and the axis of its lanes.
"""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch

from fusion.codegen.c.plan.loop_fusion import Sweep
from fusion.codegen.c.text.values import MOST_APART
from fusion.lowering.algebra.conditions import negated
from fusion.lowering.algebra.implied_conditions import is_implied
from fusion.lowering.indexing import Sizes, coefficient
from fusion.lowering.ir.expr import Expr, IndexValue, Load, Op, free_axes, loads, postorder
from fusion.lowering.ir.kernel import Kernel, KernelAxis, Spans, values_of, with_values


def with_chosen_positions(sweep: Sweep, lane: KernelAxis, sizes: Sizes) -> Sweep:
    """Return a sweep in which a choice between elements of one tensor is a load at a chosen position.

    Args:
        sizes: the sizes of all axes.
    """

    chosen: dict[Expr, Load] = {
        node: load
        for node in postorder(*sweep.roots)
        if isinstance(node, Op) and node.name == "where" and (load := _one_of(node, lane.symbol, sizes)) is not None
    }
    if not chosen:
        return sweep
    done: dict[Expr, Expr] = {}
    for node in postorder(*sweep.roots):
        done[node] = chosen.get(node) or node.rebuild([done[child] for child in node.children()])

    def each(values: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(done[value] for value in values)

    return replace(
        sweep,
        folds=tuple(with_values(fold, each(values_of(fold))) for fold in sweep.folds),
        stores=tuple(with_values(store, each(values_of(store))) for store in sweep.stores),
        keeps=tuple(replace(keep, value=done[keep.value]) for keep in sweep.keeps),
    )


def _one_of(choice: Op, lane: sympy.Symbol, sizes: Sizes) -> Load | None:
    """Return one load for a choice between loads; None where it would need a mask, or the lanes' strides differ."""
    steps: set[sympy.Expr] = set()

    def base(node: Expr, given: tuple[Expr, ...]) -> Expr | None:
        """Return the position of an arm where the lane is 0."""
        if isinstance(node, Op) and node.name == "where" and lane not in free_axes(node.args[0]):
            condition, first, second = node.args
            one, other = base(first, (*given, condition)), base(second, (*given, negated(condition)))
            return None if one is None or other is None else Op("where", (condition, one, other), torch.int64)
        if not isinstance(node, Load) or isinstance(node.index[0], Expr):
            return None
        step = coefficient(node.index[0], lane)
        if step is None or (node.mask is not None and not is_implied(node.mask, given, sizes)):
            return None
        steps.add(step)
        return IndexValue(sympy.expand(node.index[0] - step * lane))

    position, read = base(choice, ()), {(load.buffer, load.dtype) for load in loads(choice)}
    if position is None or len(steps) != 1 or len(read) != 1:
        return None
    ((buffer, dtype),) = read
    return Load(buffer, (Op("add", (position, IndexValue(steps.pop() * lane)), torch.int64),), dtype)


def unmasked(kernel: Kernel, sweep: Sweep, lane: KernelAxis, where: Spans) -> frozenset[Load]:
    """Return the loads of a sweep that need no mask in the lanes along `lane`, the axis of the innermost loop."""
    return frozenset(load for load in loads(*sweep.roots) if _is_safe(load, kernel, lane, where))


def _is_safe(load: Load, kernel: Kernel, lane: KernelAxis, where: Spans) -> bool:
    """Return whether a masked load may read the start of its tensor where the mask is false."""
    index, tensor = load.index[0], kernel.param(load.buffer)
    if load.mask is None or isinstance(index, Expr) or tensor.written or lane.symbol in where[load.mask]:
        return False
    step = coefficient(index, lane.symbol)
    if step is None or not step.is_Integer or not 1 <= step <= MOST_APART:
        return False
    farthest = step * lane.size  # less than a step of the base is left in the lanes
    return bool((tensor.extent - farthest).is_positive)


__all__ = ["unmasked", "with_chosen_positions"]
