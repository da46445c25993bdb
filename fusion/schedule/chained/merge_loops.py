"""Merges two chains into one kernel where both compute the same tile over the same grid and loop.

Input: two chains; output: one with the sinks of both, over the space of the first.  The tile relates the two spaces:
both chains compute the same point of it.  Columns of sinks, which a program holds, and the short axes of tiles are
added to that space where only the second has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import sympy

from fusion.lowering.indexing import invert
from fusion.lowering.ir.program import Axis, Contract
from fusion.schedule.chained.place_producers import Chain
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Space, fresh, place


def merged(dependences: Dependences, first: Chain, second: Chain) -> Chain | None:
    """Merge two chains; None if they do not spread and loop over the same axes of a tile that both compute."""
    shared = shared_products(dependences, first, second)
    names = grid_and_loop_axes(dependences, first, second, shared[0]) if shared else None
    looped = {axis.symbol for axis in first.space.reduced}
    if names is None or not all(names[axis.symbol] in looped for axis in second.space.reduced):
        return None
    return united(dependences, first, second, names)


def shared_products(dependences: Dependences, first: Chain, second: Chain) -> list[int]:
    """Return the products that both chains compute."""
    return [p for p in second.places if p in first.places and isinstance(dependences.node(p), Contract)]


def united(
    dependences: Dependences, first: Chain, second: Chain, names: Mapping[sympy.Symbol, sympy.Expr]
) -> Chain | None:
    """Return a chain with the nodes of both, in the space of `first` with the inner axes of both; `names`: the axes of
    `second` in it.  None if a node that both have would be placed differently.
    """
    names, shared = dict(names), shared_products(dependences, first, second)
    private = {axis.symbol for axis in second.space.private}
    for p in shared:
        pairs = ((theirs, first.places[p][axis]) for axis, theirs in second.places[p].items())
        names |= {theirs: ours for theirs, ours in pairs if isinstance(theirs, sympy.Symbol) and theirs in private}
    space, names = _with_inner_axes(first.space, second.space, names)
    sizes = space.sizes
    places = {p: {axis: place(at, names, sizes) for axis, at in ats.items()} for p, ats in second.places.items()}
    if any(p in first.places and first.places[p] != ats for p, ats in places.items()):
        return None
    return Chain((*first.sinks, *second.sinks), space, {**first.places, **places})


def grid_and_loop_axes(
    dependences: Dependences, first: Chain, second: Chain, tile: int
) -> dict[sympy.Symbol, sympy.Expr] | None:
    """Express the grid and loop axes of `second` in the axes of `first`, so that both compute `tile` at the same point.

    None if there are no such expressions.
    """
    node, space = dependences.compute(tile), second.space
    known = [second.places[tile][axis.symbol] for axis in node.axes]
    axes = [axis for axis in space.axes if axis.symbol not in space.held]
    values = tuple(sympy.Symbol(f"v{k}", integer=True, nonnegative=True) for k in range(len(known)))
    extents, sizes = [axis.size for axis in node.axes], {axis.symbol: axis.size for axis in axes}
    inverse = invert(known, values, extents, [axis.symbol for axis in axes], sizes)
    if inverse is None or any(sizes[symbol] != 1 for symbol in inverse.free):
        return None
    there = dict(zip(values, (first.places[tile][axis.symbol] for axis in node.axes), strict=True))
    expressed = {symbol: place(expr, there, first.space.sizes) for symbol, expr in inverse.axes.items()}
    expressed |= dict.fromkeys(inverse.free, sympy.Integer(0))
    return expressed


def _with_inner_axes(
    space: Space, other: Space, names: dict[sympy.Symbol, sympy.Expr]
) -> tuple[Space, dict[sympy.Symbol, sympy.Expr]]:
    """Return `space` with the axes of `other` that a program holds or keeps private, and `names` with theirs in it."""
    held = [axis for axis in other.parallel if axis.symbol in other.held]
    names, taken = dict(names), {*space.sizes}
    for axis in (*held, *other.private):
        if axis.symbol not in names:
            names[axis.symbol] = symbol = fresh(str(axis.symbol)[0], taken)
            taken.add(symbol)

    def renamed(axis: Axis) -> Axis:
        symbol = names[axis.symbol]
        assert isinstance(symbol, sympy.Symbol), "an inner axis has one axis for it"
        return Axis(symbol, axis.size)

    added, private = [renamed(axis) for axis in held], [renamed(axis) for axis in other.private]
    widened = replace(
        space,
        parallel=(*space.parallel, *added),
        held=space.held | {axis.symbol for axis in added},
        private=(*space.private, *(axis for axis in private if axis not in space.private)),
    )
    return widened, names
