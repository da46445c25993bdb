"""Computes expressions of a difference or sum of two indices once for each of its values, in a table that is read.

    f(j - i), for n rows i and m columns j    becomes    table[d] = f(d - (n - 1)), d < n + m - 1, read at j - i + n - 1

`Program → Program`.  A bias of relative positions costs logarithms, conversions and a gather at each point of rows,
columns, heads and batch, and has one value for each distance and head.  Any number of pairs of axes may enter as their
sum or difference; the other axes of the expression, as the head, are axes of the table.  Each element of a table is the
value at some point, so that the table fails no check of an index that the points pass.

Unchanged: cheap expressions, tables that would not be much smaller, conditions and numbers that hide scores, whose
bounds say which blocks a loop skips (`schedule/chained/mask_bounds.py`), random numbers, and what reads windows of a
tensor, as pools do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import sympy
import torch

from fusion.lowering.algebra.dead_code import eliminate_dead_code
from fusion.lowering.indexing import ZERO, axis_symbol, simplify, substitute
from fusion.lowering.ir.affine import symbols_of
from fusion.lowering.ir.expr import Const, Expr, Load, Random, as_stored, free_axes, index_of, loads, postorder, rewrite
from fusion.lowering.ir.program import (
    Axis,
    Buffer,
    Compute,
    Contract,
    Map,
    Node,
    Program,
    Reduce,
    axis_sizes,
    reads,
    with_exprs,
)
from fusion.lowering.ir.sizes import estimate
from fusion.lowering.value import dense_strides
from fusion.schedule.iteration.naming import unused
from fusion.schedule.rewrites.inline import FREE_OFTEN, OFTEN, cost, inline


def tabulate_differences(program: Program, hints: Mapping[sympy.Symbol, int] | None = None) -> Program:
    """Replace costly expressions of differences and sums of indices by tables; the same object if there are none.

    Args:
        hints: the values of symbolic sizes when the graph was traced.

    >>> from fusion.inspect.examples import show_program
    >>> from torch import arange, empty
    >>> def f(x, w):
    ...     return x + w[(arange(64)[None] - arange(64)[:, None]).clamp(-8, 8) + 8]
    >>> show_program(tabulate_differences, f, empty(64, 64), empty(17))
      input x: f32[64, 64]
      input w: f32[17]
    - add_1: f32[64, 64] = map(i0:64, i1:64) x[i0, i1] + w[checked(minimum(8, maximum(-8, index(i1 - i0))) + 8, 17,
            16, 0)]
    + add_1_table: f32[127] = map(i0:127) w[checked(minimum(8, maximum(-8, index(i0 - 63))) + 8, 17, 16, 0)]
    + add_1: f32[64, 64] = map(i0:64, i1:64) x[i0, i1] + add_1_table[i1 + 63 - i0]
      return add_1
    """
    tables = _Tables(program, hints or {})
    nodes: list[Node] = []
    coupled: dict[str, Map] = {}
    inlined = dict(program.inlined)
    for node in program.nodes:
        if isinstance(node, (Map, Reduce, Contract)) and node.out not in program.library:
            whole = inline(node, coupled)
            made, changed = tables.replaced(whole)
            if any(load.buffer in tables.buffers for load in loads(*changed.exprs)):
                before = (part for name in reads(node) if name in coupled for part in (*inlined.get(name, ()), name))
                inlined[node.out] = tuple(dict.fromkeys((*inlined.get(node.out, ()), *before)))
                nodes += made
                node = whole = changed
            if isinstance(whole, Map) and _is_numeric(whole.expr) and _table_of(whole.expr, whole.axes) is not None:
                coupled[node.out] = replace(whole, expr=as_stored(whole.expr))
        nodes.append(node)
    if not tables.buffers:
        return program
    return eliminate_dead_code(
        program.edited(nodes, buffers=tables.buffers.values(), origins=tables.origins, inlined=inlined)
    )


class _Tables:
    """The tables of a program: their maps are returned as they are made, their buffers and origins at the end."""

    def __init__(self, program: Program, hints: Mapping[sympy.Symbol, int]) -> None:
        self._program, self._hints = program, hints
        self._names: dict[tuple[Expr, tuple[Axis, ...], torch.device], str] = {}
        self.buffers: dict[str, Buffer] = {}
        self.origins: dict[str, str] = {}

    def replaced(self, node: Compute) -> tuple[list[Node], Compute]:
        """Return the maps of new tables, and the node that reads tables."""
        axes = (*node.axes, *node.over)
        if not _has_pairs(node.exprs, axes):
            return [], node
        tables: dict[Expr, _Table] = {}
        seen: set[Expr] = set()
        pending = list(node.exprs)
        while pending:
            part = pending.pop()
            if part in seen:
                continue
            seen.add(part)
            fits = _is_costly(part) and _is_numeric(part) and not self._reads_windows(part, axes)
            table = _table_of(part, axes) if fits else None
            if table is not None and self._is_smaller(table, part, axes):
                tables[part] = table
            else:
                pending += part.children()
        made: list[Node] = []
        exprs = list(node.exprs)
        for part in reversed(postorder(*node.exprs)):  # an expression before its parts
            if part in tables:
                exprs = rewrite(exprs, {part: self._read(tables[part], node, made)}.get)
        return made, with_exprs(node, exprs)

    def _reads_windows(self, part: Expr, axes: Sequence[Axis]) -> bool:
        """Return whether an expression reads a tensor, other than a table, along two axes at once."""
        known = {axis.symbol for axis in axes}
        read = (load.index for load in loads(part) if load.buffer not in self.buffers)
        return any(
            not isinstance(index, Expr) and len(known.intersection(symbols_of(index))) > 1
            for indices in read
            for index in indices
        )

    def _is_smaller(self, table: _Table, part: Expr, axes: Sequence[Axis]) -> bool:
        """Return whether a node evaluates an expression many times for each element of its table."""
        within = free_axes(part)
        points = self._points([axis for axis in axes if axis.symbol in within])
        return points >= OFTEN * self._points(table.axes) > 0

    def _points(self, axes: Sequence[Axis]) -> int:
        return math.prod(estimate(axis.size, self._hints) for axis in axes)

    def _read(self, table: _Table, node: Compute, made: list[Node]) -> Expr:
        """Return the load of an element of a table, whose map is added to `made` if it is new."""
        shape = tuple(axis.size for axis in table.axes)
        device, dtype = self._program.buffers[node.out].device, table.expr.dtype
        key = (table.expr, table.axes, device)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = unused(f"{node.out}_table", {*self._program.buffers, *self.buffers})
            self.buffers[name] = Buffer(name, dtype, shape, dense_strides(range(len(shape)), shape), device)
            self.origins[name] = node.out
            made.append(Map(name, table.axes, table.expr))
        sizes = axis_sizes(node)
        return Load(name, tuple(simplify(index, sizes) for index in table.at), dtype)


@dataclass(frozen=True, slots=True)
class _Table:
    """An expression over the axes of a table, and the point of these axes for each point of a node."""

    expr: Expr
    axes: tuple[Axis, ...]
    at: tuple[sympy.Expr, ...]


def _table_of(part: Expr, axes: Sequence[Axis]) -> _Table | None:
    """Return an expression over the sums and differences of axes that it depends on; None if there are none."""
    within = free_axes(part)
    at: dict[Axis, sympy.Expr] = {axis: axis.symbol for axis in axes if axis.symbol in within}
    expr, joined = part, False
    while (pair := _pair(expr, tuple(at))) is not None:
        earlier, later, sign = pair
        least = 1 - earlier.size if sign > 0 else ZERO
        axis = Axis(later.symbol, earlier.size + later.size - 1)
        points = {earlier.symbol: ZERO, later.symbol: later.symbol + least}
        at[axis] = at.pop(later) - sign * at.pop(earlier) - least
        expr, joined = substitute(expr, points, {each.symbol: each.size for each in at}), True
    if not joined:
        return None
    own = tuple(Axis(axis_symbol(k), axis.size) for k, axis in enumerate(at))
    names = {old.symbol: new.symbol for old, new in zip(at, own, strict=True)}
    return _Table(substitute(expr, names, {axis.symbol: axis.size for axis in own}), own, tuple(at.values()))


def _is_costly(part: Expr) -> bool:
    """Return whether the value of an expression takes more than an element in memory."""
    gathers = (isinstance(index, Expr) for load in loads(part) for index in load.index)
    return any(gathers) or cost(part) > FREE_OFTEN


def _is_numeric(part: Expr) -> bool:
    """Return whether an expression is no condition, hides nothing, and has the same value each time."""
    unfit = (isinstance(each, Random) or _hides(each) for each in postorder(part))
    return part.dtype is not torch.bool and not any(unfit)


def _hides(part: Expr) -> bool:
    """Return whether a number is infinite or the least one of its type."""
    if not isinstance(part, Const) or not part.dtype.is_floating_point:
        return False
    return abs(float(part.value)) >= 0.9 * torch.finfo(part.dtype).max  # as `mask_bounds` takes it


def _has_pairs(exprs: Sequence[Expr], axes: Sequence[Axis]) -> bool:
    """Return whether an index of the expressions is a function of the sum or difference of two axes."""
    known = {axis.symbol for axis in axes}
    indices = {index for part in postorder(*exprs) for index in index_of(part)}
    return any(
        _signs(index, earlier, later)
        for index in indices
        for earlier, later in combinations([symbol for symbol in symbols_of(index) if symbol in known], 2)
    )


def _pair(expr: Expr, axes: Sequence[Axis]) -> tuple[Axis, Axis, int] | None:
    """Return two axes that an expression contains as `later - sign · earlier` alone, with the sign; None if none."""
    indices = {index for part in postorder(expr) for index in index_of(part)}
    for earlier, later in combinations([axis for axis in axes if axis.size.is_positive], 2):  # a table is not empty
        both = {earlier.symbol, later.symbol}
        holding = [index for index in indices if not both.isdisjoint(symbols_of(index))]
        signs = set.intersection(*(set(_signs(index, earlier.symbol, later.symbol)) for index in holding))
        if signs:
            return earlier, later, max(signs)
    return None


@lru_cache(maxsize=1 << 14)
def _signs(index: sympy.Expr, earlier: sympy.Symbol, later: sympy.Symbol) -> tuple[int, ...]:
    """Return the signs of which an index is a function of `later - sign · earlier`."""
    if not {earlier, later}.issubset(symbols_of(index)):
        return ()
    return tuple(s for s in (1, -1) if earlier not in index.xreplace({later: later + s * earlier}).free_symbols)
