"""Which values are computed once and kept in a scratch array, rather than computed again.

Three reasons to keep a value:

- a later sweep over the same resident axes needs it and computing it costs more than reading it back (the exponential
  of a softmax; not `x - mean`, nor a load);
- a later sweep compares it with what was folded from it (the flags of a row's maximum), over axes however long: lanes
  and the rest of a loop do not compute a function to the same last bit, and loops leave different rests;
- it does not depend on some loop that stands outside a loop it does depend on, and would be computed again on every
  turn (a reciprocal per column, used for every row of a block).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import sympy

from codegen.c.walks.lanes import Lanes, loop_order
from codegen.c.walks.sweeps import Keep, Sweep
from codegen.c.walks.threads import cost_of
from lowering.expr import Const, Expr, IndexValue, Load, Op, TileRef, postorder
from lowering.kernel import KernelAxis, Spans

WORTH_KEEPING = 6
"""Least cost of a value that is kept for a later sweep: a store and a load from the cache, and the room they take."""

WORTH_HOISTING = 4
"""Least cost of a value that is computed before the loop it does not depend on."""

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

LIMIT = 1 << 22
"""Most bytes of one scratch array; beyond, a value is computed again."""


def plan_scratch(sweeps: Sequence[Sweep], lanes: Lanes, where: Spans, fresh: Callable[[str], str]) -> tuple[Sweep, ...]:
    """`sweeps` with keeps added, and sweeps added that only keep."""
    return _hoist(_carry(sweeps, lanes, where, fresh), lanes, where, fresh)


def _carry(sweeps: Sequence[Sweep], lanes: Lanes, where: Spans, fresh: Callable[[str], str]) -> tuple[Sweep, ...]:
    result = list(sweeps)
    computed: dict[bool, dict[Expr, int]] = {True: {}, False: {}}  # resident? expression: the first that evaluates it
    kept: set[Expr] = set()
    for k, sweep in enumerate(result):
        if not sweep.axes:
            continue
        order, lane = loop_order(sweep, lanes, where)
        axes = (*order, *((lane,) if lane else ()))
        symbols = {axis.symbol for axis in axes}
        before, compared = computed[sweep.resident], _compared(sweep)

        def again(
            node: Expr,
            symbols: set[sympy.Symbol] = symbols,
            before: dict[Expr, int] = before,
            wanted: set[Expr] | None = None if sweep.resident else compared,
        ) -> bool:
            found = node in before and (wanted is None or node in wanted)
            return found and _costs(node, WORTH_KEEPING, symbols, where)

        for node in outermost(sweep.roots, kept, again):
            spanned = tuple(axis for axis in axes if axis.symbol in where[node])
            if spanned and node not in kept and (node in compared or _fits(spanned, lanes, node)):
                kept.add(node)
                first = before[node]
                keep = Keep(fresh("kept"), node, tuple(axis.symbol for axis in spanned))
                result[first] = replace(result[first], keeps=(*result[first].keeps, keep))
        for node in postorder(*sweep.roots):
            if where[node] & {axis.symbol for axis in sweep.axes}:
                before.setdefault(node, k)
    return tuple(result)


def _hoist(sweeps: Sequence[Sweep], lanes: Lanes, where: Spans, fresh: Callable[[str], str]) -> tuple[Sweep, ...]:
    result: list[Sweep] = []
    kept = {keep.value for sweep in sweeps for keep in sweep.keeps}
    for sweep in sweeps:
        order, lane = loop_order(sweep, lanes, where)
        axes = (*order, *((lane,) if lane else ()))

        def invariant(node: Expr, axes: tuple[KernelAxis, ...] = axes) -> bool:
            """Does a loop that `node` does not depend on stand outside one it depends on?"""
            depends = [axis.symbol in where[node] for axis in axes]
            if not any(depends) or depends == sorted(depends, reverse=True):
                return False
            return _costs(node, WORTH_HOISTING, {axis.symbol for axis in axes}, where)

        for node in outermost(sweep.roots, kept, invariant):
            spanned = tuple(axis for axis in axes if axis.symbol in where[node])
            if _fits(spanned, lanes, node):
                kept.add(node)
                keep = Keep(fresh("kept"), node, tuple(axis.symbol for axis in spanned))
                own = tuple(axis for axis in spanned if lanes.axis is None or axis is not lanes.axis)
                result.append(Sweep(own, keeps=(keep,)))
        result.append(sweep)
    return tuple(result)


def _compared(sweep: Sweep) -> set[Expr]:
    """What a sweep compares with the result of a fold."""
    found: set[Expr] = set()
    for node in postorder(*sweep.roots):
        if isinstance(node, Op) and node.name in COMPARISONS and any(isinstance(arg, TileRef) for arg in node.args):
            found.update(arg for arg in node.args if not isinstance(arg, TileRef))
    return found


def outermost(roots: Sequence[Expr], kept: set[Expr], wanted: Callable[[Expr], bool]) -> list[Expr]:
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


def _costs(node: Expr, least: int, symbols: set[sympy.Symbol], where: Spans) -> bool:
    """Does one evaluation cost `least` inside the loops over `symbols`?  Loads are free: they are read again."""
    seen = {node}
    stack = [node]
    total = 0
    while stack and total < least:
        part = stack.pop()
        if where[part] & symbols:
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
