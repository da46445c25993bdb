"""Turns blocks of tensors that a loop would read across their rows, such as the mask of a gradient of keys.

Input: a loop; output: lines that copy each such block into a tile whose rows are lanes.  Elements that are a row apart
share neither a vector nor, where rows are a multiple of a kilobyte, enough sets of a cache.  (measured:
docs/performance.md, `turned`)
"""

from __future__ import annotations

import sympy

from fusion.codegen.c.blocked.held import tile_over
from fusion.codegen.c.blocked.scope import TileScope
from fusion.codegen.c.text.storage import NARROW_FLOATS, VALUE_TYPES
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Expr, Load, loads
from fusion.lowering.ir.kernel import Fold, Loop, values_of


def turned(loop: Loop, scope: TileScope) -> tuple[list[str], list[Load]]:
    """Return lines that copy blocks into tiles, and the loads that are read from these from now on."""
    lines: list[str] = []
    copied: list[Load] = []
    for lane in loop.axes:
        rows = _rows_of_products(lane, loop, scope)
        for load in dict.fromkeys(loads(*(value for stmt in loop.body for value in values_of(stmt)))):
            row = next((row for row in rows if _is_read_across(load, row, lane, scope)), None)
            if row is None:
                continue
            name = scope.space.fresh("turned")
            tile = scope.allocate(tile_over(name, VALUE_TYPES[load.dtype], (row, lane), scope.blocks))
            nest = scope.nest([load], (lane, row))
            nest.write(f"{scope.at(tile)} = {nest.texts[0]};")
            lines += nest.lines()
            scope.known[load] = tile
            copied.append(load)
    return lines, copied


def _rows_of_products(lane: sympy.Symbol, loop: Loop, scope: TileScope) -> list[sympy.Symbol]:
    """Return the rows of the products of which the points of a loop are the columns, along which lanes run."""
    products = (stmt for stmt in loop.body if isinstance(stmt, Fold) and stmt.op == "dot" and stmt.carry is None)
    rows: dict[sympy.Symbol, None] = {}
    for product in products:
        left, right = (scope.tiled(arg) for arg in product.args)
        if lane in right and lane not in product.over:
            rows.update(dict.fromkeys(axis for axis in left if axis not in (*right, *product.over)))
    return list(rows)


def _is_read_across(load: Load, row: sympy.Symbol, lane: sympy.Symbol, scope: TileScope) -> bool:
    """Return whether a tensor has a number for each row and lane, and its neighbours are along the rows."""
    index = load.index[0]
    if load in scope.known or load.mask is not None or load.buffer in scope.written or load.dtype in NARROW_FLOATS:
        return False
    if isinstance(index, Expr) or set(scope.tiled(load)) != {row, lane}:
        return False
    return coefficient(index, row) == 1 and coefficient(index, lane) not in (None, 0, 1)


__all__ = ["turned"]
