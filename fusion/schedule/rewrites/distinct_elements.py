"""Writes scatters whose sources have an element each as maps: nothing collides, and nothing needs zeros beforehand.

    zeros(n, m)[i + c, j] += a[i, j]      =      where(c ≤ d < c + size, 0 + a[d - c, j], 0)      for each d < n

`Program → Program`.  Each index is an axis of its own, perhaps with a constant, so that the element determines its
source.  The gradient of an embedding of positions is one: as a map it joins the sum over the batch and the rounding in
one kernel, without atomic operations.  The scatter must start from a constant; otherwise it changes a tensor in place,
and may leave most of it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce

import sympy

from fusion.lowering.algebra.dead_code import eliminate_dead_code
from fusion.lowering.indexing import ZERO, axis_symbol, substitute_all
from fusion.lowering.ir.expr import Const, Expr, IndexValue, guarded, make_op, position
from fusion.lowering.ir.program import Axis, Map, Program, Scatter
from fusion.lowering.ir.scalar_ops import ScalarName


def map_distinct_elements(program: Program) -> Program:
    """Replace such scatters by maps; the same object if there are none.

    >>> from fusion.inspect.examples import show_program
    >>> from torch import arange, empty, zeros
    >>> def f(rows):
    ...     return zeros(900, 8).index_add(0, arange(3, 803), rows)
    >>> show_program(map_distinct_elements, f, empty(800, 8))
      input rows: f32[800, 8]
    - index_add: f32[900, 8] = map(i0:900, i1:8) 0.0
    - index_add_1: f32[900, 8] = scatter(i0:800, i1:8; into index_add) [index(i0 + 3), index(i1)] += rows[i0, i1]
    +   %1 = (index(i0) >= 3) & (index(i0) < 803)
    + index_add_1: f32[900, 8] = map(i0:900, i1:8) where(%1, 0.0 + rows[i0 - 3, i1 if %1], 0.0)
      return index_add_1
    """
    starts = {node.out: node.expr for node in program.nodes if isinstance(node, Map) and isinstance(node.expr, Const)}
    maps: dict[str, Map] = {}
    for node in program.nodes:
        if isinstance(node, Scatter) and node.start in starts:
            mapped = _mapped(node, starts[node.start], program.buffers[node.out].shape)
            if mapped is not None:
                maps[node.out] = mapped
    if not maps:
        return program
    nodes = (maps.get(node.out, node) if isinstance(node, Scatter) else node for node in program.nodes)
    return eliminate_dead_code(program.edited(nodes))


def _mapped(node: Scatter, start: Const, shape: Sequence[sympy.Expr]) -> Map | None:
    """Return a scatter as a map over its elements; None if two sources may have the same one."""
    if node.op not in ("sum", "store") or node.where is not None:
        return None
    elements = tuple(Axis(axis_symbol(k), size) for k, size in enumerate(shape))
    sizes = {axis.symbol: axis.size for axis in node.axes}
    sources: dict[sympy.Symbol, sympy.Expr] = {symbol: ZERO for symbol, size in sizes.items() if size == 1}
    conditions: list[Expr] = []
    for index, element in zip(node.index, elements, strict=True):
        source = _source(index, sizes)
        if source is None or source in sources:
            return None
        assert isinstance(index, IndexValue)
        first = index.index - source
        if first != 0 or sizes[source] != element.size:
            if not _lies_within(first, sizes[source], element.size):
                return None
            conditions += _between(element.symbol, first, first + sizes[source])
        sources[source] = element.symbol - first
    if sources.keys() != sizes.keys():
        return None
    (value,) = substitute_all([node.value], sources, {axis.symbol: axis.size for axis in elements})
    if node.op == "sum":
        value = make_op("add", start, value)
    return Map(node.out, elements, _where(conditions, value, start))


def _source(index: Expr, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> sympy.Symbol | None:
    """Return the only axis of an index; None if it has none, or several, or depends on data."""
    symbols = index.index.free_symbols & sizes.keys() if isinstance(index, IndexValue) else set()
    return next(iter(symbols)) if len(symbols) == 1 else None


def _lies_within(first: sympy.Expr, count: sympy.Expr, size: sympy.Expr) -> bool:
    """Return whether `count` elements from `first` on are known to be within `size`."""
    known = all(each.is_Integer for each in (first, count, size))
    return known and 0 <= int(first) <= int(size) - int(count)


def _between(symbol: sympy.Symbol, first: sympy.Expr, end: sympy.Expr) -> list[Expr]:
    """Return the conditions that an index is at least `first` and less than `end`."""
    bounds: tuple[tuple[ScalarName, sympy.Expr], ...] = (("ge", first), ("lt", end))
    return [make_op(name, IndexValue(symbol), position(bound)) for name, bound in bounds]


def _where(conditions: Sequence[Expr], value: Expr, start: Const) -> Expr:
    """Return a value where all conditions hold, and the start elsewhere."""
    if not conditions:
        return value
    condition = reduce(partial(make_op, "and"), conditions)
    chosen = guarded(value, condition)
    return chosen if start.value == 0 else make_op("where", condition, chosen, start)
