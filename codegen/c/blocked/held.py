"""Allocates tiles in memory: private arrays of a thread with a value for every point of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from fusion.codegen.c.blocked.blocks import Blocks
from fusion.codegen.c.text.code import Code, element_of
from fusion.codegen.c.text.indices import Names, index_text
from fusion.codegen.c.text.products import COLUMN_BLOCK, ROW_BLOCK
from fusion.codegen.c.text.scratch import Scratch
from fusion.lowering.indexing import ONE, ZERO, FloorDiv

CACHE_SET_PADDING = 16
"""Padding in elements of rows whose length is a multiple of a kilobyte: their columns would share a cache set."""


@dataclass(frozen=True, slots=True)
class ArrayTile:
    """An array `name` of `count` elements of C type `held`; along `axes[k]` its elements are `strides[k]` apart.

    `full`: it has all points of its axes; otherwise those of the current block.
    """

    name: str
    held: str
    axes: tuple[sympy.Symbol, ...]
    strides: tuple[sympy.Expr, ...]
    count: sympy.Expr
    full: bool = False

    def stride(self, symbol: sympy.Symbol | None) -> sympy.Expr:
        """Return the stride of `symbol` in elements: 0 if the tile does not have it."""
        return self.strides[self.axes.index(symbol)] if symbol is not None and symbol in self.axes else ZERO

    def position(self, blocks: Blocks, names: Names, first: Sequence[sympy.Symbol | None] = ()) -> str:
        """Return the offset of the current point's element; of the first point for the axes in `first`.

        Axes of one point have no loop, so they are left out.
        """
        parts = []
        for symbol, stride in zip(self.axes, self.strides, strict=True):
            if symbol not in first and blocks.of[symbol].bound != 1:
                slot = Code(names[symbol]) if self.full else blocks.of[symbol].extent.slot
                parts.append(slot.text if stride == 1 else f"{slot.at()}*{_factor(stride, names)}")
        return " + ".join(parts) or "0"

    def element(self, blocks: Blocks, names: Names) -> Code:
        """Return the element of the current point."""
        return element_of(self.name, self.position(blocks, names))

    def scratch(self, names: Names) -> Scratch:
        """Return the array to be allocated."""
        return Scratch(self.name, self.held, _factor(self.count, names))


def _factor(expr: sympy.Expr, names: Names) -> str:
    text = index_text(expr, names)
    return text if expr.is_Integer or expr.is_Symbol else f"({text})"


def round_up(size: sympy.Expr, multiple: int) -> sympy.Expr:
    """Return the least multiple of `multiple` that is not below `size`."""
    if size.is_Integer:
        return sympy.Integer(-(-int(size) // multiple) * multiple)
    return multiple * FloorDiv(size + multiple - 1, multiple)


def tile_over(name: str, held: str, axes: Sequence[sympy.Symbol], blocks: Blocks) -> ArrayTile:
    """Return a tile over `axes`, contiguous along the last."""
    strides: list[sympy.Expr] = []
    step = ONE
    for symbol in reversed(axes):
        strides.append(step)
        bound = blocks.of[symbol].bound
        assert bound is not None
        step = step * bound if len(strides) > 1 or len(axes) == 1 else _row(bound)
    return ArrayTile(name, held, tuple(axes), tuple(reversed(strides)), step)


def product_tile(
    name: str,
    held: str,
    others: Sequence[sympy.Symbol],
    row: sympy.Symbol | None,
    column: sympy.Symbol | None,
    blocks: Blocks,
) -> ArrayTile:
    """Return a tile for products over (`row`, `column`), padded to whole register blocks."""
    width = _row(_bound(column, blocks))
    strides = [*([width] if row is not None else []), *([ONE] if column is not None else [])]
    step = width * round_up(_bound(row, blocks), ROW_BLOCK)
    for symbol in reversed(others):
        strides.insert(0, step)
        step = step * _bound(symbol, blocks)
    axes = (*others, *(symbol for symbol in (row, column) if symbol is not None))
    return ArrayTile(name, held, axes, tuple(strides), step)


def packed_tile(
    name: str, held: str, depth: sympy.Symbol | None, column: sympy.Symbol | None, blocks: Blocks
) -> ArrayTile:
    """Return a tile for a packed operand."""
    return ArrayTile(name, held, (), (), _bound(depth, blocks) * round_up(_bound(column, blocks), COLUMN_BLOCK))


def row_stride(column: sympy.Symbol | None, blocks: Blocks) -> sympy.Expr:
    """Return the row stride of a `product_tile`, in elements."""
    return _row(_bound(column, blocks))


def _bound(symbol: sympy.Symbol | None, blocks: Blocks) -> sympy.Expr:
    bound = ONE if symbol is None else blocks.of[symbol].bound
    assert bound is not None
    return bound


def _row(bound: sympy.Expr) -> sympy.Expr:
    width = round_up(bound, COLUMN_BLOCK)
    return width + CACHE_SET_PADDING if not width.is_Integer or int(width) % 64 == 0 else width
