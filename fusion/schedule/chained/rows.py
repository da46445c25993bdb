"""Joins the rows of several programs that read the same columns, where one program has few rows.

Input: a chain; output: the chain with a grid axis split in two, one of which counts rows.  With eight query heads that
share keys and values, each with a single query, eight programs would each read these; as eight rows of one tile they
read them once.  The indices alone show it: one side of a product reads `h // 8`, and does not vary along `h % 8`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import sympy

from fusion.lowering.indexing import split_points, substitute_all
from fusion.lowering.ir.expr import Expr, loads
from fusion.lowering.ir.program import Axis, Contract
from fusion.schedule.chained.occupancy import rows_of
from fusion.schedule.chained.place_producers import Chain
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import fresh, place

MATRIX_UNIT_ROWS = 16
"""Rows that the matrix units take at least: a tile with fewer has room for others."""


def with_shared_columns(dependences: Dependences, chain: Chain) -> Chain:
    """Return the chain with rows of other programs that share its columns, if it has few; else the same object."""
    if _count(dependences, chain) >= MATRIX_UNIT_ROWS:
        return chain
    indices = list(_indices(dependences, chain))
    for axis in chain.space.parallel:
        points = [] if axis.symbol in chain.space.held else split_points(indices, axis.symbol, axis.size)
        if not points:
            continue
        split = _split(chain, axis, points)
        if axis.symbol not in rows_of(dependences, chain) and _count(dependences, split) > _count(dependences, chain):
            chain, indices = split, list(_indices(dependences, split))
    return chain


def _count(dependences: Dependences, chain: Chain) -> int:
    rows = rows_of(dependences, chain)
    return math.prod(dependences.estimate(axis.size) for axis in chain.space.parallel if axis.symbol in rows)


def _indices(dependences: Dependences, chain: Chain) -> Iterator[sympy.Expr]:
    """Yield the indices at which the products of a chain read, over its axes."""
    for member, placement in chain.places.items():
        node = dependences.compute(member)
        if isinstance(node, Contract):
            for load in loads(*substitute_all(node.exprs, placement, chain.space.sizes)):
                yield from (index for index in load.index if not isinstance(index, Expr))


def _split(chain: Chain, axis: Axis, points: list[int]) -> Chain:
    """Replace `axis` of the chain by several axes, whose strides within it are 1 and `points`."""
    taken = {*chain.space.sizes}
    bounds = [1, *points, int(axis.size)]
    parts: list[Axis] = []
    recombined: sympy.Expr = sympy.Integer(0)
    for stride, end in pairwise(bounds):
        parts.insert(0, Axis(fresh("h", taken), sympy.Integer(end // stride)))
        taken.add(parts[0].symbol)
        recombined += stride * parts[0].symbol
    parallel = [part for other in chain.space.parallel for part in (parts if other is axis else [other])]
    space = replace(chain.space, parallel=tuple(parallel))
    places = {
        member: {own: place(expr, {axis.symbol: recombined}, space.sizes) for own, expr in placement.items()}
        for member, placement in chain.places.items()
    }
    return replace(chain, space=space, places=places)
