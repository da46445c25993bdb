"""Keeps the results of folds over an outer loop that stand in a loop inside it: one for each point of the inner loop.

Input: a fold over an outer loop; output: an array of a thread with all points of the inner loop, and the lines that add
to it the product of the two current blocks.  The gradient of queries is such a fold beside the gradients of keys and
values: a thread runs over blocks of keys, and over blocks of queries inside, so the sums of a key stay in a block, and
those of all queries of a head in the array.  They are added in the order of the loops, whatever the number of threads.
"""

from __future__ import annotations

import sympy

from fusion.codegen.c.blocked.factors import TiledProduct
from fusion.codegen.c.blocked.held import ArrayTile, product_tile
from fusion.codegen.c.blocked.scope import TileScope
from fusion.codegen.c.text.folds import started
from fusion.codegen.c.text.nest import render
from fusion.codegen.c.text.storage import VALUE_TYPES
from fusion.lowering.indexing import ONE
from fusion.lowering.ir.kernel import Fold, Role


def crossing_tile(fold: Fold, scope: TileScope) -> ArrayTile:
    """Return an array with the results of `fold` at all points of its LOOP and WHOLE axes, the latter innermost."""
    spanned = [
        block.axis
        for symbol, block in scope.blocks.of.items()
        if symbol in scope.where[fold.ref] and block.axis.role is not Role.GRID
    ]
    ordered = sorted(spanned, key=lambda axis: axis.role is Role.WHOLE)
    strides: list[sympy.Expr] = []
    count = ONE
    for axis in reversed(ordered):
        strides.insert(0, count)
        count = count * axis.size
    axes = tuple(axis.symbol for axis in ordered)
    return ArrayTile(scope.space.exactly(fold.name), VALUE_TYPES[fold.dtype], axes, tuple(strides), count, full=True)


def cleared(fold: Fold, tile: ArrayTile, scope: TileScope) -> list[str]:
    """Return lines that fill an array with the identity of `fold`, before its loop."""
    at = scope.space.fresh("at")
    header = f"for (int64_t {at} = 0; {at} < {tile.scratch(scope.names).count}; {at}++)"
    return ["#pragma omp simd", header, f"    {tile.name}[{at}] = {started(fold)};"]


def block_of(tile: ArrayTile, product: TiledProduct, scope: TileScope) -> ArrayTile:
    """Return a tile for the product of two blocks, which is added to `tile`."""
    name = scope.space.fresh(f"{tile.name}_block")
    return scope.allocate(product_tile(name, tile.held, product.others, product.row, product.column, scope.blocks))


def added_to(tile: ArrayTile, block: ArrayTile, scope: TileScope) -> list[str]:
    """Return lines that add a block of results to the array of all."""
    order = sorted(block.axes, key=lambda symbol: block.stride(symbol) == 1)
    levels, _ = scope.levels(order, lanes=True)
    levels[-1].before.append(f"{scope.at(tile)} += {scope.at(block)};")
    return render(levels)


__all__ = ["added_to", "block_of", "cleared", "crossing_tile"]
