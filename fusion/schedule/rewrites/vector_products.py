"""Makes a sum of products of each contraction with a vector, or with a few rows.

    y[i] = Σ_r w[i, r] · x[r]      is a reduction like others: it reads each element of the matrix once.

`Program → Program`, for targets that compute reductions at the speed of memory (`Capabilities.few_rows`).  Tiles would
be packed, and read again.  As a reduction it takes operands in that are computed element by element, such as unpacked
weights, and shares loops with neighbours.  With more than one row, the elements of the matrix must be consecutive along
the sum, so that a target can use each for all rows when it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import sympy
import torch

from fusion.lowering.expr import Expr, Load, Op, free_axes, loads, make_cast
from fusion.lowering.program import Buffer, Contract, Map, Node, Program, Reduce
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.iteration.naming import unused


def sum_vectors(
    program: Program, chains: Sequence[Cluster], most: tuple[int, int] = (1, 1)
) -> tuple[Program, tuple[Cluster, ...]]:
    """Replace contractions with few rows, outside the chains `chains`; return the program, and the chains in it.

    `most`: see `Capabilities.few_rows`.

    >>> from fusion.inspect.examples import show_program
    >>> from torch import empty
    >>> show_program(lambda program: sum_vectors(program, ())[0], lambda w, x: w @ x, empty(30, 40), empty(40, 1))
      input w: f32[30, 40]
      input x: f32[40, 1]
    - mm: f32[30, 1] = contract(i0:30, i1:1 over r0:40; rows i0, columns i1; in f32) w[i0, r0], x[r0, i1]
    + mm: f32[30, 1] = sum(i0:30, i1:1 over r0:40) w[i0, r0] * x[r0, i1]
      return mm
    """
    chained = {member for cluster in chains for member in cluster.members}
    few = of_few_rows(program, most)
    sums: dict[str, Buffer] = {}
    nodes: list[Node] = []
    for position, node in enumerate(program.nodes):
        if isinstance(node, Contract) and node.out in few and position not in chained:
            nodes += _sum(program, node, sums)
        else:
            nodes.append(node)
    origins = {buffer.name: out for out, buffer in sums.items()}
    summed = program.edited(nodes, buffers=sums.values(), origins=origins)
    return summed, tuple(chains) if summed is program else positions_in(summed, program, chains)


def of_few_rows(program: Program, most: tuple[int, int]) -> frozenset[str]:
    """Return the contractions that read each element of one side once, for the few rows of the other side.

    `most`: see `Capabilities.few_rows`.  With a single row, elements may be stored in any order, and sizes be symbolic.
    """
    maps = {node.out for node in program.nodes if isinstance(node, Map)}
    products = (node for node in program.nodes if isinstance(node, Contract)) if any(most) else ()
    return frozenset(product.out for product in products if _has_few_rows(program, product, most, maps))


def _has_few_rows(program: Program, product: Contract, most: tuple[int, int], maps: Collection[str]) -> bool:
    sizes = {axis.symbol: axis.size for axis in product.axes}
    sides = ((product.rows, product.rhs, product.columns), (product.columns, product.lhs, product.rows))
    counts = [(sympy.Mul(*(sizes[symbol] for symbol in side)), matrix, across) for side, matrix, across in sides]
    if any(count == 1 for count, _, _ in counts):
        return True
    known = all(axis.size.is_Integer for axis in (*product.axes, *product.over))
    if not known or len(product.rows) + len(product.columns) < len(product.axes):
        return False
    for count, matrix, across in counts:
        is_plain = isinstance(matrix, Load) and matrix.buffer not in maps
        if count <= most[0 if is_plain else 1] and _is_read_along_rows(program, product, matrix, across):
            return True
    return False


def _is_read_along_rows(program: Program, product: Contract, matrix: Expr, across: Sequence[sympy.Symbol]) -> bool:
    """Return whether the largest tensor that a side reads is consecutive along the sum."""
    over, columns = {axis.symbol for axis in product.over}, set(across)
    elements = [load for load in loads(matrix) if over & free_axes(load) and columns & free_axes(load)]
    if not elements or product.accumulate is not torch.float32:
        return False
    counts = {load: program.buffers[load.buffer].numel for load in elements}
    largest = max(elements, key=lambda load: int(counts[load]) if counts[load].is_Integer else 0)
    last, strides = largest.index[-1], program.buffers[largest.buffer].strides
    return isinstance(last, sympy.Expr) and bool(last.free_symbols & over) and strides[-1] == 1


def _sum(program: Program, product: Contract, sums: dict[str, Buffer]) -> Iterator[Node]:
    """Yield the sum of products and, if `product` has another dtype, its conversion; `sums`: product → its sum."""
    out, dtype = program.buffers[product.out], product.accumulate
    terms = Op("mul", (make_cast(product.lhs, dtype), make_cast(product.rhs, dtype)), dtype)
    if out.dtype is dtype:
        yield Reduce(out.name, product.axes, product.over, "sum", (terms,), dtype)
        return
    name = unused(f"{out.name}_sum", {*program.buffers, *(buffer.name for buffer in sums.values())})
    sums[out.name] = replace(out, name=name, dtype=dtype)
    yield Reduce(name, product.axes, product.over, "sum", (terms,), dtype)
    whole = Load(name, tuple(axis.symbol for axis in product.axes), dtype)
    yield Map(out.name, product.axes, make_cast(whole, out.dtype))
