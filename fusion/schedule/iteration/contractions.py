"""Decides which contractions may share a loop, and prices the sharing.

Two products over the same axes that read one operand alike (gate and up of a gated MLP, the keys and values of a layer,
two sides multiplied by one matrix) load it once if one loop computes both.  Each has its own accumulator, so tiles are
smaller; together they are like one product with as many times the columns.  Products without a common operand may share
a loop if one value is computed from all of them (the gradient of scores, from the scores and the gradients of the
weights): their results stay in registers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import sympy

from fusion.codegen.target import ProductTiles
from fusion.lowering.indexing import coefficient, substitute_all
from fusion.lowering.ir.expr import Expr, Load
from fusion.lowering.ir.program import Contract, Map
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.iteration.space import Placement, Space


def contractions(dependences: Dependences, members: Collection[int]) -> tuple[int, ...]:
    """Return the members that are contractions."""
    return tuple(member for member in members if isinstance(dependences.node(member), Contract))


def leading_to(dependences: Dependences, members: Collection[int], position: int) -> frozenset[int]:
    """Return the members that the one at `position` depends on."""
    producers = {dependences.compute(member).out: member for member in members}
    ancestors: set[int] = set()
    pending = [position]
    while pending:
        read = {producers[load.buffer] for load in dependences.loads[pending.pop()] if load.buffer in producers}
        pending.extend(read - ancestors)
        ancestors |= read
    return frozenset(ancestors)


def refused(
    dependences: Dependences, members: Collection[int], space: Space, places: Mapping[int, Placement]
) -> str | None:
    """Return why the contractions among `members` cannot run in one loop; None if they can, or form a chain."""
    products = contractions(dependences, members)
    if len(products) < 2 or space.chained:
        return None
    sides: set[tuple[frozenset[frozenset[sympy.Symbol]], frozenset[sympy.Symbol]]] = set()
    operands: list[frozenset[Expr]] = []
    reduced = {axis.symbol for axis in space.reduced}
    for position in products:
        node, at = dependences.compute(position), places.get(position)
        assert isinstance(node, Contract)
        if at is None:
            return "a contraction cannot be read at another index than its own"
        if not all(isinstance(dependences.node(m), Map) for m in leading_to(dependences, members, position)):
            return "a fold would feed the contraction"
        over = _spanned((axis.symbol for axis in node.over), at)
        if _spanned((axis.symbol for axis in node.axes), at) & over or not over <= reduced:
            return "one contraction runs over what the other one keeps"
        rows, columns = _spanned(node.rows, at), _spanned(node.columns, at)
        sides.add((frozenset((rows, columns)), over))
        operands.append(frozenset(substitute_all(node.exprs, at, space.sizes)))
    if len(sides) > 1:
        return "two contractions that run over different axes"
    if not frozenset[Expr].intersection(*operands) and not _meet(dependences, members, products):
        return "two contractions that share no operand, and no reader"
    return None


def _meet(dependences: Dependences, members: Collection[int], products: Sequence[int]) -> bool:
    """Return whether a member is computed from the results of all contractions, which are larger than their operands:
    apart, one of them would be stored.
    """
    return all(_is_outer(dependences, product) for product in products) and any(
        {*products} <= leading_to(dependences, members, member) for member in members
    )


def _is_outer(dependences: Dependences, product: int) -> bool:
    """Return whether the results of a contraction, in memory, would be larger than its operands."""
    node = dependences.compute(product)
    assert isinstance(node, Contract)
    sizes = {axis.symbol: axis.size for axis in (*node.axes, *node.over)}
    rows, columns, over = (
        sympy.Mul(*(sizes[symbol] for symbol in symbols))
        for symbols in (node.rows, node.columns, (axis.symbol for axis in node.over))
    )
    stored, multiplied = node.accumulate.itemsize * rows * columns, node.lhs.dtype.itemsize * over * (rows + columns)
    return bool((stored - multiplied).is_nonnegative)


def slowdown(dependences: Dependences, members: Collection[int], tiles: ProductTiles) -> float:
    """Return the ratio of the time of a cluster's contractions in one loop to their time one after the other.

    Each has a tile with a part of the columns.  The ratio counts the elements loaded per multiplication, and whether
    the columns fill the matrix units.  Two that share their rows lose nothing if their other operands have the same
    layout, so that they can be multiplied as one matrix.
    """
    products = contractions(dependences, members)
    if len(products) < 2:
        return 1.0
    operands = [frozenset(load.buffer for load in dependences.loads[product]) for product in products]
    if not frozenset[str].intersection(*operands):
        return divided(len(products), tiles, shared=False) / tiles.together
    if len(products) == 2 and _have_one_layout(dependences, products):
        return 1.0
    return divided(len(products), tiles) / tiles.together


def divided(count: int, tiles: ProductTiles, *, shared: bool = True) -> float:
    """Return the relative cost of tiles of 1/`count` of the columns, or the next lower power of two.

    Args:
        shared: the products load one operand once for all; otherwise each loads both of its operands.

    >>> from fusion.inspect.examples import TARGET
    >>> [round(divided(count, TARGET.capabilities.tiles), 2) for count in (1, 2, 3, 4, 8)]
    [1.0, 1.0, 1.11, 1.0, 2.0]
    >>> round(divided(2, TARGET.capabilities.tiles, shared=False), 2)
    1.33
    """
    columns = 1 << (tiles.columns // count).bit_length() - 1
    single = (tiles.rows + tiles.columns) / (tiles.rows * tiles.columns)
    loaded = count * columns if shared else columns
    together = (tiles.rows + loaded) / (tiles.rows * loaded)
    return max(1.0, together / single) * max(1.0, tiles.least_columns / columns)


def _have_one_layout(dependences: Dependences, products: Sequence[int]) -> bool:
    """Return whether contractions multiply one operand by matrices that are contiguous along the reduced axes."""
    for position in products:
        node = dependences.compute(position)
        assert isinstance(node, Contract)
        buffers = dependences.program.buffers
        if not isinstance(node.rhs, Load):
            return False
        indices = [index for index in node.rhs.index if not isinstance(index, Expr)]
        if len(indices) < len(node.rhs.index):
            return False
        strides = buffers[node.rhs.buffer].strides
        offset = sympy.Add(*(i * s for i, s in zip(indices, strides, strict=True)))
        if not any(coefficient(sympy.expand(offset), axis.symbol) == 1 for axis in node.over):
            return False
    return True


def _spanned(axes: Iterable[sympy.Symbol], placement: Placement) -> frozenset[sympy.Symbol]:
    return frozenset(symbol for axis in axes for symbol in placement[axis].free_symbols)


__all__ = ["contractions", "leading_to", "refused", "slowdown"]
