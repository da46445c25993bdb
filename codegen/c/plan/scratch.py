"""Decides which values are kept in a scratch array rather than recomputed.

Three reasons to keep a value:

- a later sweep over the same resident axes needs it and recomputing costs more than reading it back (the exponential of
  a softmax, or what is computed from a load at a stride; not `x - mean`, nor a load);
- it is invariant in a loop that is outside of a loop it varies in, and would be recomputed in every iteration (a
  reciprocal per column, used for every row of a block);
- it is scanned along the lanes, which then run in order, one after the other: a loop before computes it in lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial

import sympy

from fusion.codegen.c.plan.lanes import Lanes, loop_order
from fusion.codegen.c.plan.loop_fusion import Keep, Sweep
from fusion.codegen.c.plan.threads import cost_of
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Const, Expr, IndexValue, Load, TileRef, postorder
from fusion.lowering.ir.kernel import KernelAxis, Spans

WORTH_KEEPING = 6
"""The least cost of a value that is kept for a later sweep: a store and a load from the cache, and their space."""

WORTH_HOISTING = 4
"""The least cost of a value that is hoisted out of a loop."""

MOST_SCRATCH = 1 << 22
"""The most bytes of one scratch array; beyond, a value is recomputed."""


def plan_scratch(
    sweeps: Sequence[Sweep], lanes: Lanes, where: Spans, fresh: Callable[[str], str], tabled: Set[Expr] = frozenset()
) -> tuple[Sweep, ...]:
    """Return `sweeps` with keeps added, and sweeps added that only keep; `tabled`: values that are kept already."""
    return _hoist(
        _before_scans(_carry(sweeps, lanes, where, fresh, tabled), lanes, where, fresh), lanes, where, fresh, tabled
    )


def _before_scans(
    sweeps: Sequence[Sweep], lanes: Lanes, where: Spans, fresh: Callable[[str], str]
) -> tuple[Sweep, ...]:
    """Compute the costly operands of scans in a sweep before it, since a scan visits its lanes in order."""
    result: list[Sweep] = []
    for sweep in sweeps:
        order, lane = loop_order(sweep, lanes, where)
        if sweep.scans and lane is not None and lane.symbol in sweep.over:
            axes = (*order, lane)
            symbols, own = {axis.symbol for axis in axes}, {keep.value for keep in sweep.keeps}
            keeps = []
            for node in outermost([arg for scan in sweep.scans for arg in scan.args], own, _is_plain):
                spanned = tuple(axis for axis in axes if axis.symbol in where[node])
                if lane in spanned and costs(node, WORTH_KEEPING, symbols, where) and _fits(spanned, lanes, node):
                    keeps.append(Keep(fresh("kept"), node, tuple(axis.symbol for axis in spanned)))
            if keeps:
                result.append(replace(sweep, folds=(), stores=(), scans=(), keeps=tuple(keeps)))
        result.append(sweep)
    return tuple(result)


def _is_plain(node: Expr) -> bool:
    """Return whether no scan or fold is part of a value."""
    return not any(isinstance(part, TileRef) for part in postorder(node))


def _carry(
    sweeps: Sequence[Sweep], lanes: Lanes, where: Spans, fresh: Callable[[str], str], tabled: Set[Expr]
) -> tuple[Sweep, ...]:
    result = list(sweeps)
    computed: dict[Expr, int] = {}  # expression: the first resident sweep that evaluates it
    kept = set(tabled)
    for k, sweep in enumerate(result):
        if not (sweep.resident and sweep.axes):
            continue
        order, lane = loop_order(sweep, lanes, where)
        axes = (*order, *((lane,) if lane else ()))
        symbols = {axis.symbol for axis in axes}
        known = frozenset({*_invariants(sweep.roots, axes, kept, where), *kept})
        costly = partial(costs, least=WORTH_KEEPING, symbols=symbols, where=where, before=known, lane=lane)

        def again(node: Expr, costly: Callable[[Expr], bool] = costly) -> bool:
            return node in computed and costly(node)

        for node in outermost(sweep.roots, kept, again):
            spanned = tuple(axis for axis in axes if axis.symbol in where[node])
            if spanned and node not in kept and _fits(spanned, lanes, node):
                kept.add(node)
                first = computed[node]
                keep = Keep(fresh("kept"), node, tuple(axis.symbol for axis in spanned))
                result[first] = replace(result[first], keeps=(*result[first].keeps, keep))
        for node in postorder(*sweep.roots):
            if where[node] & {axis.symbol for axis in sweep.axes}:
                computed.setdefault(node, k)
    return tuple(result)


def _hoist(
    sweeps: Sequence[Sweep], lanes: Lanes, where: Spans, fresh: Callable[[str], str], tabled: Set[Expr]
) -> tuple[Sweep, ...]:
    result: list[Sweep] = []
    kept = {*tabled, *(keep.value for sweep in sweeps for keep in sweep.keeps)}
    for sweep in sweeps:
        order, lane = loop_order(sweep, lanes, where)
        axes = (*order, *((lane,) if lane else ()))
        own_keeps = {keep.value for keep in sweep.keeps}  # computed here, from possible invariants
        for node in _invariants(sweep.roots, axes, kept - own_keeps, where):
            spanned = tuple(axis for axis in axes if axis.symbol in where[node])
            if _fits(spanned, lanes, node):
                kept.add(node)
                keep = Keep(fresh("kept"), node, tuple(axis.symbol for axis in spanned))
                own = tuple(axis for axis in spanned if lanes.axis is None or axis is not lanes.axis)
                result.append(Sweep(own, keeps=(keep,)))
        result.append(sweep)
    return tuple(result)


def _invariants(roots: Sequence[Expr], axes: Sequence[KernelAxis], kept: Set[Expr], where: Spans) -> list[Expr]:
    """Return costly values that are invariant in a loop outside of one they vary in."""

    def invariant(node: Expr) -> bool:
        depends = [axis.symbol in where[node] for axis in axes]
        if not any(depends) or depends == sorted(depends, reverse=True):
            return False
        return costs(node, WORTH_HOISTING, {axis.symbol for axis in axes}, where)

    return outermost(roots, kept, invariant)


def outermost(roots: Sequence[Expr], kept: Set[Expr], wanted: Callable[[Expr], bool]) -> list[Expr]:
    """Return the largest sub-expressions of `roots` that are wanted and not inside a kept one, in a fixed order."""
    result: dict[Expr, None] = {}
    seen: set[Expr] = set()
    stack = list(reversed(roots))
    while stack:
        node = stack.pop()
        if node in seen or node in kept:
            continue
        seen.add(node)
        if not isinstance(node, (Const, IndexValue, TileRef, Load)) and wanted(node):
            result[node] = None
        else:
            stack.extend(reversed(node.children()))
    return list(result)


def _is_strided(load: Load, lane: KernelAxis | None) -> bool:
    """Return whether neighbouring lanes load elements at a constant distance of more than one."""
    if lane is None or isinstance(load.index[0], Expr):
        return False
    stride = coefficient(load.index[0], lane.symbol)
    return stride is not None and stride not in (-1, 0, 1)


def costs(
    node: Expr,
    least: int,
    symbols: set[sympy.Symbol],
    where: Spans,
    before: Set[Expr] = frozenset(),
    lane: KernelAxis | None = None,
) -> bool:
    """Return whether one evaluation costs `least` inside the loops over `symbols`.  Loads are free: they are repeated.

    So are values known `before`; loads at a stride along `lane` are not: each lane loads on its own.
    """
    seen = {node}
    stack = [node]
    total = 0
    while stack and total < least:
        part = stack.pop()
        if where[part] & symbols and part not in before:
            total += (least if _is_strided(part, lane) else 0) if isinstance(part, Load) else cost_of(part)
            fresh = [child for child in part.children() if child not in seen]
            seen.update(fresh)
            stack.extend(fresh)
    return total >= least


def _fits(axes: Sequence[KernelAxis], lanes: Lanes, value: Expr) -> bool:
    """Return whether the array is small enough; unknown sizes are assumed to be."""
    size: sympy.Expr = sympy.Integer(max(value.dtype.itemsize, 4))
    for axis in axes:
        block = lanes.block if axis is lanes.axis else None
        size *= axis.size if block is None else block
    return not size.is_Integer or int(size) <= MOST_SCRATCH
