"""Spreads scatters of many sources to few elements over several copies of each element, and folds the copies.

    out[x[i]] += a[i]      =      parts[x[i], i % n] += a[i];  out[b] = Σ_k parts[b, k]

`Program → Program`, for targets whose updates are atomic: updates of one element wait for each other, and so do updates
of the elements of one sector.  Neighbouring sources update different copies, so that the threads of a warp never
collide, however the sources are distributed; of one element they are neighbours in memory.  (measured:
docs/performance.md, `scatter_copies`)

Only scatters that start from the identity of their fold: of others the memory is an input, or holds a result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.algebra.dead_code import eliminate_dead_code
from fusion.lowering.indexing import Mod, axis_symbol, coefficient, over_symbol, simplify
from fusion.lowering.ir.expr import Const, Expr, IndexValue, Load, const, loads
from fusion.lowering.ir.program import Axis, Buffer, Map, Node, Program, Reduce, Scatter, axis_sizes
from fusion.lowering.ir.scalar_ops import identity
from fusion.lowering.ir.sizes import estimate
from fusion.lowering.value import contiguous_strides
from fusion.schedule.iteration.naming import unused

_CROWDED = 128
"""Sources of each element from which copies pay; each copy is left with at least a quarter of them."""

_SPREAD = 1 << 16
"""Elements, in all copies, over which the updates are spread: 256 KB are parts of all channels of the cache."""


def copy_elements(
    program: Program, capabilities: Capabilities, hints: Mapping[sympy.Symbol, int] | None = None
) -> Program:
    """Spread such scatters over copies of their elements; the same object if there are none.

    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from torch import empty, zeros
    >>> show_program(
    ...     lambda program: copy_elements(program, replace(TARGET.capabilities, ordered=False)),
    ...     lambda bins, x: zeros(500).index_add(0, bins, x),
    ...     empty(1 << 17, dtype=int),
    ...     empty(1 << 17),
    ... )
      input bins: i64[131072]
      input x: f32[131072]
    - index_add: f32[500] = map(i0:500) 0.0
    + index_add_1_start: f32[500, 8] = map(i0:500, i1:8) 0.0
    - index_add_1: f32[500] = scatter(i0:131072; into index_add) [bins[i0]] += x[i0] where checked(bins[i0], 0, 499,
            200) == bins[i0]
    + index_add_1_part: f32[500, 8] = scatter(i0:131072; into index_add_1_start) [bins[i0], index(i0%8)] += x[i0]
            where checked(bins[i0], 0, 499, 200) == bins[i0]
    + index_add_1: f32[500] = sum(i0:500 over r0:8) index_add_1_part[i0, r0]
      return index_add_1
    """
    if capabilities.ordered:
        return program
    starts = {node.out: node for node in program.nodes if isinstance(node, Map) and isinstance(node.expr, Const)}
    nodes: list[Node] = []
    buffers: list[Buffer] = []
    origins: dict[str, str] = {}
    for node in program.nodes:
        count = _copies(program, node, starts, hints or {})
        if count < 2:
            nodes.append(node)
            continue
        assert isinstance(node, Scatter)
        names = [unused(f"{node.out}_{ending}", {*program.buffers, *origins}) for ending in ("start", "part")]
        nodes += _in_copies(program, node, starts[node.start].expr, names, count)
        old = program.buffers[node.out]
        shape = (*old.shape, sympy.Integer(count))
        buffers += [replace(old, name=name, shape=shape, strides=contiguous_strides(shape)) for name in names]
        origins |= dict.fromkeys(names, node.out)
    if not buffers:
        return program
    return eliminate_dead_code(program.edited(nodes, buffers=buffers, origins=origins))


def _copies(program: Program, node: Node, starts: Mapping[str, Map], hints: Mapping[sympy.Symbol, int]) -> int:
    """Return the number of copies of each element; 1 for nodes that stay."""
    if not isinstance(node, Scatter) or node.op == "store" or node.start not in starts:
        return 1
    start = starts[node.start].expr
    if start is not const(identity(node.op, start.dtype), start.dtype) or _by_rows(program, node):
        return 1
    elements = max(1, estimate(program.buffers[node.out].numel, hints))
    crowd = math.prod(estimate(axis.size, hints) for axis in node.axes) // elements
    return 1 if crowd < _CROWDED else _power_of_two(min(4 * crowd // _CROWDED, _SPREAD // elements))


def _by_rows(program: Program, node: Scatter) -> bool:
    """Return whether rows of elements are updated by rows of sources, so that neighbouring threads never collide.

    Sources whose rows are in memory along another axis, such as the positions of a head, are read along that.
    """
    last = node.index[-1]
    if not isinstance(last, IndexValue):
        return False
    steps: set[sympy.Symbol] = set()
    for load in loads(node.value):
        pairs = zip(load.index, program.buffers[load.buffer].strides, strict=True)
        parts = (index * stride for index, stride in pairs if not isinstance(index, Expr))
        offset = simplify(sympy.Add(*parts), axis_sizes(node))
        if offset.free_symbols & last.index.free_symbols:
            steps |= {axis.symbol for axis in node.colliding if coefficient(offset, axis.symbol) == 1}
    return not steps


def _power_of_two(count: int) -> int:
    """Return the greatest power of two that is not above `count`, at least 1."""
    return 1 << max(0, count.bit_length() - 1)


def _in_copies(program: Program, node: Scatter, start: Expr, names: list[str], count: int) -> list[Node]:
    """Return the nodes that fill the copies, update them, and fold them."""
    assert node.op != "store"
    filled, parts = names
    place: sympy.Expr = sympy.Integer(0)
    for axis in node.colliding:
        place = place * axis.size + axis.symbol
    number = sympy.Integer(count)
    elements = tuple(Axis(axis_symbol(k), size) for k, size in enumerate(program.buffers[node.out].shape))
    copies = Axis(over_symbol(0), number)
    part = Load(parts, tuple(axis.symbol for axis in (*elements, copies)), start.dtype)
    return [
        Map(filled, (*elements, Axis(axis_symbol(len(elements)), number)), start),
        replace(node, out=parts, start=filled, index=(*node.index, IndexValue(Mod(place, number)))),
        Reduce(node.out, elements, (copies,), node.op, (part,), start.dtype),
    ]
