"""Replaces contractions with a vector, or with a few rows (GEMV, skinny GEMM), by sums of products.

    y[i] = Σ_r w[i, r] · x[r]      is a reduction like others: it reads each element of the matrix once.

`Program → Program`, for targets that compute reductions at the speed of memory (`Capabilities.few_rows`).  Tiles would
be packed, and read again.  As a reduction it takes operands in that are computed element by element, such as unpacked
weights, and shares loops with neighbours.  With more than one row, the elements of the matrix must be consecutive along
the sum, so that a target can use each for all rows when it is read.

The price decides between the sum and the library's product, for which operands that are computed have to be stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from fusion.codegen.price import Rates
from fusion.codegen.target import Capabilities
from fusion.lowering.ir.expr import Expr, Load, Op, free_axes, loads, make_cast
from fusion.lowering.ir.program import Buffer, Contract, Map, Node, Program, Reduce
from fusion.lowering.ir.sizes import estimate
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.clusters.work import additions_per_point, is_refetched
from fusion.schedule.iteration.naming import unused

ARRANGED = 3
"""A byte of the smaller factor of a sum, relative to a byte that a GEMM packs: staged, and arranged in new memory."""


def sum_few_rows(
    program: Program, chains: Sequence[Cluster], capabilities: Capabilities
) -> tuple[Program, tuple[Cluster, ...]]:
    """Replace contractions with few rows, outside the chains `chains`; return the program, and the chains in it.

    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from torch import empty
    >>> def summed(program):
    ...     return sum_few_rows(program, (), replace(TARGET.capabilities, few_rows=16))[0]
    >>> show_program(summed, lambda w, x: w @ x, empty(30, 40), empty(40, 1))
      input w: f32[30, 40]
      input x: f32[40, 1]
    - mm: f32[30, 1] = contract(i0:30, i1:1 over r0:40; rows i0, columns i1; in f32) w[i0, r0], x[r0, i1]
    + mm: f32[30, 1] = sum(i0:30, i1:1 over r0:40) w[i0, r0] * x[r0, i1]
      return mm
    """
    chained = {member for cluster in chains for member in cluster.members}
    few = of_few_rows(program, capabilities)
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


def of_few_rows(program: Program, capabilities: Capabilities) -> frozenset[str]:
    """Return the contractions that take no longer as sums, which read each element of one side once.

    With a single row, elements may be stored in any order, and sizes be symbolic.
    """
    if not capabilities.few_rows:
        return frozenset()
    maps = {node.out: node for node in program.nodes if isinstance(node, Map)}
    products = (node for node in program.nodes if isinstance(node, Contract))
    few = (product for product in products if _has_few_rows(program, product, capabilities.few_rows))
    return frozenset(product.out for product in few if _is_faster(program, product, maps, capabilities.rates))


def _has_few_rows(program: Program, product: Contract, most: int) -> bool:
    sizes = {axis.symbol: axis.size for axis in product.axes}
    sides = ((product.rows, product.rhs, product.columns), (product.columns, product.lhs, product.rows))
    counts = [(sympy.Mul(*(sizes[symbol] for symbol in side)), matrix, across) for side, matrix, across in sides]
    if any(count == 1 for count, _, _ in counts):
        return True
    known = all(axis.size.is_Integer for axis in (*product.axes, *product.over))
    if not known or len(product.rows) + len(product.columns) < len(product.axes):
        return False
    return any(
        count <= most and _is_read_along_rows(program, product, matrix, across) for count, matrix, across in counts
    )


def _is_faster(program: Program, product: Contract, maps: Mapping[str, Map], rates: Rates) -> bool:
    """Return whether a contraction takes no longer as a sum than as the library's product of stored operands."""
    points = math.prod(estimate(axis.size, {}) for axis in (*product.axes, *product.over))
    operands, written = {load.buffer for load in loads(product.lhs, product.rhs)}, _bytes(program, product.out)
    stored = sum(_bytes(program, name) for name in operands)
    computed = {name: _computing(program, maps, name, rates) for name in operands if name in maps}

    items = max(product.lhs.dtype.itemsize, product.rhs.dtype.itemsize)
    packing = rates.scalar_us(rates.steps.packed_by_library * stored)
    library = rates.price(stored + written, products=rates.product_us_of(2 * points, items), scalars=packing).total
    library += rates.product_us
    for name, (read, scalars) in computed.items():
        library += rates.price(read + _bytes(program, name), scalars=scalars).total

    read = stored + sum(read - _bytes(program, name) for name, (read, _) in computed.items())
    *_, total = (node for node in _sum(program, product, {}) if isinstance(node, Reduce))
    terms = rates.scalar_us(additions_per_point(program, total, rates) * points + _arranging(program, product, rates))
    summed = rates.price(read + written, scalars=terms + sum(us for _, us in computed.values()))
    # second reads, from the next cache, compete with first reads, from memory
    return summed.total + (summed.hidden if is_refetched(total, rates.steps) else 0.0) <= library


def _arranging(program: Program, product: Contract, rates: Rates) -> float:
    """Return the additions of bringing the smaller factor of a sum into the order in which the larger one is read."""
    over = {axis.symbol for axis in product.over}
    costs: list[tuple[int, float]] = []
    for side in (product.lhs, product.rhs):
        read, total = 0, 0.0
        for load in loads(side):
            if not load.index or not over & free_axes(load):  # a number may be read under a mask along the sum
                continue
            last, size = load.index[-1], _bytes(program, load.buffer)
            across = isinstance(last, sympy.Expr) and not last.free_symbols & over
            read += size
            total += (ARRANGED * rates.steps.packed + across * rates.steps.turned / load.dtype.itemsize) * size
        costs.append((read, -total))
    return -min(costs)[1]


def _computing(program: Program, maps: Mapping[str, Map], name: str, rates: Rates) -> tuple[int, float]:
    """Return the bytes that the maps which lead to a tensor read, and the microseconds of their operations."""
    work = rates.scalar_us(additions_per_point(program, maps[name], rates) * estimate(program.buffers[name].numel, {}))
    read = 0
    for each in {load.buffer for load in loads(maps[name].expr)}:
        before = _computing(program, maps, each, rates) if each in maps else (_bytes(program, each), 0.0)
        read, work = read + before[0], work + before[1]
    return read, work


def _bytes(program: Program, name: str) -> int:
    buffer = program.buffers[name]
    return estimate(buffer.numel, {}) * buffer.dtype.itemsize


def _is_read_along_rows(program: Program, product: Contract, matrix: Expr, across: Sequence[sympy.Symbol]) -> bool:
    """Return whether the largest tensor that a side reads is consecutive along the sum."""
    over, columns = {axis.symbol for axis in product.over}, set(across)
    read = (load for load in loads(matrix) if load.index)
    elements = [load for load in read if over & free_axes(load) and columns & free_axes(load)]
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
