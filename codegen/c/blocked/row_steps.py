"""Chooses at launch how many rows a block has, where loops skip points that count for none of its rows.

Input: a kernel whose loops have ranges; output: C lines that change the width of row blocks.  Fewer rows see fewer
points together: of a window of 256 keys 192 rows walk 447, 64 rows 319.  More rows share the packing of each point.  So
the cost of a width is the sum over all blocks of (points in their ranges) · (rows + `PACKED_ROWS`).
"""

from __future__ import annotations

import sympy

from fusion.codegen.c.blocked.ranges import LoopRange, range_of
from fusion.codegen.c.blocked.scope import TileScope
from fusion.codegen.c.text.nest import indented
from fusion.codegen.c.text.products import PART
from fusion.lowering.ir.expr import free_axes
from fusion.lowering.ir.kernel import Kernel, Loop, Role, statements

PACKED_ROWS = 10
"""Rows of a block that take as long as the packing of a point, and its part of what is done once for each block."""


def narrower_rows(kernel: Kernel, scope: TileScope) -> list[str]:
    """Return lines that narrow the row blocks of a kernel, unless these are already narrower to give threads work."""
    blocks, space, ranges = scope.blocks, scope.space, _ranges(kernel, scope)
    if not ranges or blocks.rows is None:
        return []
    bound, step = blocks.of[blocks.rows].bound, blocks.step
    cost, least, width = (space.fresh(stem) for stem in ("cost", "cheapest", "width"))
    count = f"({blocks.count(blocks.rows)} + {PACKED_ROWS})"
    body: list[str] = []
    for within in ranges:
        body += ["{", *indented(within.lines)]
        body += [f"    {cost} += imax(0, {within.end} - {within.first})*{count};", "}"]
    asked = _asked(kernel)
    for axis in reversed(kernel.axes):
        block = blocks.of[axis.symbol]
        if axis.symbol in asked and (axis.role is Role.GRID or axis.symbol == blocks.rows):
            body = [f"{block.header} {{", *indented([*block.inside, *body]), "}"]
    tried = [f"int64_t {cost} = 0;", *body]
    tried.append(f"if ({cost} < {least}) {least} = {cost}, {width} = {step};")
    return [
        f"if ({step} == {bound}) {{",
        f"    int64_t {least} = INT64_MAX, {width} = {step};",
        f"    for (int64_t {step} = {bound}; {step} > 0; {step} -= {PART}) {{",
        *indented(indented(tried)),
        "    }",
        f"    {step} = {width};",
        "}",
    ]


def _asked(kernel: Kernel) -> frozenset[sympy.Symbol]:
    """Return the axes that the conditions of loops depend on."""
    loops = statements(kernel.body, Loop)
    return frozenset(axis for loop in loops if loop.where is not None for axis in free_axes(loop.where))


def _ranges(kernel: Kernel, scope: TileScope) -> list[LoopRange]:
    """Return the ranges of all loops that rows determine, if blocks of rows can be narrowed."""
    rows = scope.blocks.rows
    bound = None if rows is None else scope.blocks.of[rows].bound
    if bound is None or not bound.is_Integer or bound <= PART or rows not in _asked(kernel):
        return []
    scope.known = {}  # nothing is computed yet
    ranges: list[LoopRange] = []
    for loop in statements(kernel.body, Loop):
        if loop.where is not None:
            within = range_of(loop, scope)
            if within is not None and free_axes(loop.where).isdisjoint({*loop.axes} - {within.axis}):
                ranges.append(within)
    return ranges
