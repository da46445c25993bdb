"""Transposes tiles: loads that are contiguous along the other axis are staged in a transposed tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy

from fusion.codegen.c.plan.lanes import TILE, Lanes
from fusion.codegen.c.text.code import Code, element_of
from fusion.codegen.c.text.indices import Names, index_text
from fusion.codegen.c.text.nest import Extent, Namespace
from fusion.codegen.c.text.storage import loaded, memory_type
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Expr, Load, postorder


def stage_tiles(
    roots: Sequence[Expr],
    lanes: Lanes,
    extents: Mapping[sympy.Symbol, Extent],
    names: Names,
    params: Mapping[str, str],
    space: Namespace,
) -> tuple[list[str], dict[Load, Code]]:
    """Return lines that fill the tiles of one program, and how each load reads from its tile.

    A load under a mask is not staged: part of its tile may be outside of the tensor.
    """
    if lanes.tile is None or lanes.axis is None:
        return [], {}
    across, along = lanes.tile.symbol, lanes.axis.symbol
    rows, columns = extents[along], extents[across]  # of the memory that is read: contiguous along `across`
    corner = {symbol: extents[symbol].first for symbol in (across, along)}
    begun = {start: start.name for start in corner.values() if isinstance(start, sympy.Symbol)}
    corner_names = {**names, **begun}
    lines: list[str] = []
    staged: dict[Load, Code] = {}
    for node in postorder(*roots):
        if not isinstance(node, Load) or node.mask is not None or isinstance(node.index[0], Expr):
            continue
        stride = coefficient(node.index[0], along)
        if coefficient(node.index[0], across) != 1 or stride in (None, 0, 1):
            continue
        held, buffer = memory_type(node.dtype), params[node.buffer]
        tile = space.fresh(f"{buffer}_tile")
        start = index_text(sympy.expand_mul(node.index[0].xreplace(corner)), corner_names)
        shape = f"{index_text(stride, names)}, {_points(rows)}, {_points(columns)}"
        lines.append(f"_Alignas(64) {held} {tile}[{TILE}][{TILE}];")
        lines.append(f"transpose_{held}({buffer} + {start}, {shape}, {tile});")
        staged[node] = loaded(node.dtype, element_of(f"{tile}[{columns.slot}]", rows.slot))
    return lines, staged


def _points(extent: Extent) -> str:
    """Return the number of points of an axis in the tile."""
    return str(extent.size) if extent.filled else f"{extent.end} - {extent.start}"
