"""Which values are computed once and kept in a scratch array, rather than computed again.

Two reasons to keep a value:

- a later sweep over the same resident axes needs it and computing it costs more than reading it back (the exponential
  of a softmax; not `x - mean`, nor a load);
- it does not depend on some loop that stands outside a loop it does depend on, and would be computed again on every
  turn (a reciprocal per column, used for every row of a block).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

import sympy

from fusion.codegen.c.walks.lanes import Lanes, loop_order
from fusion.codegen.c.walks.sweeps import Keep, Sweep
from fusion.codegen.c.walks.threads import cost_of
from fusion.lowering.expr import Const, Expr, IndexValue, Load, TileRef, postorder
from fusion.lowering.kernel import KernelAxis, Spans

WORTH_KEEPING = 6
"""Least cost of a value that is kept for a later sweep: a store and a load from the cache, and the room they take."""

WORTH_HOISTING = 4
"""Least cost of a value that is computed before the loop it does not depend on."""

LIMIT = 1 << 22
"""Most bytes of one scratch array; beyond, a value is computed again."""


def plan_scratch(sweeps: Sequence[Sweep], lanes: Lanes, where: Spans, fresh: Callable[[str], str]) -> tuple[Sweep, ...]:
    """`sweeps` with keeps added, and sweeps added that only keep."""
    return _hoist(_carry(sweeps, lanes, where, fresh), lanes, where, fresh)


def _carry(sweeps: Sequence[Sweep], lanes: Lanes, where: Spans, fresh: Callable[[str], str]) -> tuple[Sweep, ...]:
    result = list(sweeps)
    computed: dict[Expr, int] = {}  # expression: the first resident sweep that evaluates it
    kept: set[Expr] = set()
    for k, sweep in enumerate(result):
        if not (sweep.resident and sweep.axes):
            continue
        order, lane = loop_order(sweep, lanes, where)
        axes = (*order, *((lane,) if lane else ()))
        symbols = {axis.symbol for axis in axes}
        before = frozenset(_invariants(sweep.roots, axes, kept, where))

        def again(node: Expr, symbols: set[sympy.Symbol] = symbols, before: frozenset[Expr] = before) -> bool:
            return node in computed and _costs(node, WORTH_KEEPING, symbols, where, before)

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


def _hoist(sweeps: Sequence[Sweep], lanes: Lanes, where: Spans, fresh: Callable[[str], str]) -> tuple[Sweep, ...]:
    result: list[Sweep] = []
    kept = {keep.value for sweep in sweeps for keep in sweep.keeps}
    for sweep in sweeps:
        order, lane = loop_order(sweep, lanes, where)
        axes = (*order, *((lane,) if lane else ()))
        own_keeps = {keep.value for keep in sweep.keeps}  # computed here, of what may be invariant
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
    """What costs something and does not depend on a loop that stands outside one it depends on."""

    def invariant(node: Expr) -> bool:
        depends = [axis.symbol in where[node] for axis in axes]
        if not any(depends) or depends == sorted(depends, reverse=True):
            return False
        return _costs(node, WORTH_HOISTING, {axis.symbol for axis in axes}, where)

    return outermost(roots, kept, invariant)


def outermost(roots: Sequence[Expr], kept: Set[Expr], wanted: Callable[[Expr], bool]) -> list[Expr]:
    """The largest sub-expressions of `roots` that are wanted and not inside a kept one, in a fixed order."""
    found: dict[Expr, None] = {}
    seen: set[Expr] = set()
    stack = list(reversed(roots))
    while stack:
        node = stack.pop()
        if node in seen or node in kept:
            continue
        seen.add(node)
        if not isinstance(node, (Const, IndexValue, TileRef, Load)) and wanted(node):
            found[node] = None
        else:
            stack.extend(reversed(node.children()))
    return list(found)


def _costs(node: Expr, least: int, symbols: set[sympy.Symbol], where: Spans, before: Set[Expr] = frozenset()) -> bool:
    """Does one evaluation cost `least` inside the loops over `symbols`?  Loads are free: they are read again.

    So is what has been computed `before` them.
    """
    seen = {node}
    stack = [node]
    total = 0
    while stack and total < least:
        part = stack.pop()
        if where[part] & symbols and part not in before:
            total += 0 if isinstance(part, Load) else cost_of(part)
            fresh = [child for child in part.children() if child not in seen]
            seen.update(fresh)
            stack.extend(fresh)
    return total >= least


def _fits(axes: Sequence[KernelAxis], lanes: Lanes, value: Expr) -> bool:
    """Is the array known to be small enough?  Sizes that are not known are taken as resident rows usually are."""
    size = sympy.Integer(max(value.dtype.itemsize, 4))
    for axis in axes:
        block = lanes.block if axis is lanes.axis else None
        size *= axis.size if block is None else block
    return not size.is_Integer or size <= LIMIT
