"""Makes a sum of products of each contraction with a vector.

    y[i] = Σ_r w[i, r] · x[r]      is a reduction like others: it reads each element of the matrix once.

`Program → Program`, for targets that compute reductions at the speed of memory (`Capabilities.vectors`).  Tiles would
be packed, and read again.  As a reduction it takes operands in that are computed element by element, such as unpacked
weights, and shares loops with neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusion.lowering.expr import Load, Op, make_cast
from fusion.lowering.program import Buffer, Contract, Map, Node, Program, Reduce
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.iteration.naming import unused


def sum_vectors(program: Program, chains: Sequence[Cluster]) -> tuple[Program, tuple[Cluster, ...]]:
    """Replace contractions with a vector, outside the chains `chains`; return the program, and the chains in it.

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
    made: dict[str, Buffer] = {}
    nodes: list[Node] = []
    for position, node in enumerate(program.nodes):
        if isinstance(node, Contract) and has_vector(node) and position not in chained:
            nodes += _sum(program, node, made)
        else:
            nodes.append(node)
    origins = {buffer.name: out for out, buffer in made.items()}
    summed = program.edited(nodes, buffers=made.values(), origins=origins)
    return summed, tuple(chains) if summed is program else positions_in(summed, program, chains)


def has_vector(product: Contract) -> bool:
    """Return whether one side has a single row of its own: the product reads each element of the other side once."""
    sizes = {axis.symbol: axis.size for axis in product.axes}
    return any(all(sizes[symbol] == 1 for symbol in side) for side in (product.rows, product.columns))


def _sum(program: Program, product: Contract, made: dict[str, Buffer]) -> Iterator[Node]:
    """Yield the sum of products and, if `product` has another dtype, its conversion; `made`: product → its sum."""
    out, dtype = program.buffers[product.out], product.accumulate
    terms = Op("mul", (make_cast(product.lhs, dtype), make_cast(product.rhs, dtype)), dtype)
    if out.dtype is dtype:
        yield Reduce(out.name, product.axes, product.over, "sum", (terms,), dtype)
        return
    name = unused(f"{out.name}_sum", {*program.buffers, *(buffer.name for buffer in made.values())})
    made[out.name] = replace(out, name=name, dtype=dtype)
    yield Reduce(name, product.axes, product.over, "sum", (terms,), dtype)
    whole = Load(name, tuple(axis.symbol for axis in product.axes), dtype)
    yield Map(out.name, product.axes, make_cast(whole, out.dtype))
