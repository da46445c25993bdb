"""Joins the rows of several programs that read the same columns, where one program has few rows.

Input: a stream; output: the stream with an axis of its programs split in two, of which one counts rows. Of eight query
heads that share their keys and values, each with a single query, eight programs would read these again; as eight rows
of one tile they read them once.  It is seen in the indices alone: what one side of a product reads by `h // 8`, it does
not vary along `h % 8`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import sympy

from fusion.lowering.expr import Expr, loads
from fusion.lowering.indexing import split_points, substitute_all
from fusion.lowering.program import Axis, Contract
from fusion.schedule.chained.occupancy import rows_of
from fusion.schedule.chained.place_producers import Stream
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import fresh, place

FEW = 16
"""Rows that the matrix units take at least: with fewer there is room for others."""


def with_shared_columns(dependences: Dependences, made: Stream) -> Stream:
    """`made` with rows of other programs that share its columns, where it has few; else the same object."""
    if _count(dependences, made) >= FEW:
        return made
    indices = list(_indices(dependences, made))
    for axis in made.space.parallel:
        points = [] if axis.symbol in made.space.held else split_points(indices, axis.symbol, axis.size)
        if not points:
            continue
        split = _split(made, axis, points)
        if axis.symbol not in rows_of(dependences, made) and _count(dependences, split) > _count(dependences, made):
            made, indices = split, list(_indices(dependences, split))
    return made


def _count(dependences: Dependences, made: Stream) -> int:
    rows = rows_of(dependences, made)
    return math.prod(dependences.estimate(axis.size) for axis in made.space.parallel if axis.symbol in rows)


def _indices(dependences: Dependences, made: Stream) -> Iterator[sympy.Expr]:
    """The indices at which the products of a stream read, over its axes."""
    for member, placement in made.places.items():
        node = dependences.compute(member)
        if isinstance(node, Contract):
            for load in loads(*substitute_all(node.exprs, placement, made.space.sizes)):
                yield from (index for index in load.index if not isinstance(index, Expr))


def _split(made: Stream, axis: Axis, points: list[int]) -> Stream:
    """`made` with `axis` split at strides `points`."""
    taken = {*made.space.sizes}
    bounds = [1, *points, int(axis.size)]
    parts: list[Axis] = []
    whole: sympy.Expr = sympy.Integer(0)
    for stride, end in pairwise(bounds):
        parts.insert(0, Axis(fresh("h", taken), sympy.Integer(end // stride)))
        taken.add(parts[0].symbol)
        whole += stride * parts[0].symbol
    parallel = [part for other in made.space.parallel for part in (parts if other is axis else [other])]
    space = replace(made.space, parallel=tuple(parallel))
    places = {
        member: {own: place(expr, {axis.symbol: whole}, space.sizes) for own, expr in placement.items()}
        for member, placement in made.places.items()
    }
    return replace(made, space=space, places=places)
