"""Places the factors of a product in memory, and writes the calls that multiply them.

Input: a `dot` between values of a scope; output: lines that copy its factors into memory, if they are not there yet,
and calls of `products`.  A tensor that is only read is used in place, whatever its strides.  Of few rows, the right
factor is not packed either, if its elements lie side by side along one of its axes (`few_rows`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sympy
import torch

from fusion.codegen.c.blocked.blocks import length
from fusion.codegen.c.blocked.held import ArrayTile, packed_tile, row_stride
from fusion.codegen.c.blocked.scope import TileScope
from fusion.codegen.c.text.few_rows import ELEMENTS
from fusion.codegen.c.text.indices import index_text
from fusion.codegen.c.text.nest import render
from fusion.codegen.c.text.products import COLUMN_BLOCK
from fusion.codegen.c.text.storage import VALUE_TYPES
from fusion.lowering.indexing import ZERO, coefficient
from fusion.lowering.ir.expr import Cast, Expr, Load
from fusion.lowering.ir.kernel import Fold


@dataclass(frozen=True, slots=True)
class TiledProduct:
    """Describes a `dot` as calls: the axes of its tile and its factors; None for absent axes.

    `left` spans `row` and `depth`, `right` spans `depth` and `column`; there is one call per point of the `others`,
    which are axes of the result, and of `deeper`, which are summed over too.
    """

    left: Expr
    right: Expr
    row: sympy.Symbol | None
    column: sympy.Symbol | None
    depth: sympy.Symbol | None
    others: tuple[sympy.Symbol, ...]
    deeper: tuple[sympy.Symbol, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed factor called `name`: the lines before all calls of a product, and those before each call."""

    lines: list[str]
    each: list[str]
    name: str


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A right factor in memory, for few rows.

    Attributes:
        element: the type of its elements, as `few_rows` names it.
        along_depth: whether its elements lie side by side along the depth; else along the columns.
        place: its first element.
        stride: the text of the distance between columns, or between terms.
    """

    element: str
    along_depth: bool
    place: str
    stride: str


class ProductFactors:
    """The factors of the products of one kernel.

    Attributes:
        packed: the factors that are packed in the current scope, with their two axes.

    Args:
        few: rows up to which the right factor is read in place.
    """

    def __init__(self, scope: TileScope, few: int) -> None:
        self.scope, self._few = scope, few
        self.packed: dict[tuple[Expr, sympy.Symbol | None, sympy.Symbol | None], ArrayTile] = {}

    def product(self, fold: Fold) -> TiledProduct:
        """Return the calls that compute a `dot`.  The longer side becomes the columns if the other one is too short."""
        left, right = fold.args

        def longest(symbols: Sequence[sympy.Symbol]) -> sympy.Symbol | None:
            return max(reversed(symbols), key=self.scope.blocks.points, default=None)

        # An expanded factor varies along no row (column) of the product, so neither does the result.
        row = longest([symbol for symbol in self.scope.tiled(left) if symbol in fold.rows])
        column = longest([symbol for symbol in self.scope.tiled(right) if symbol in fold.columns])
        width, height = (1 if symbol is None else self.scope.blocks.points(symbol) for symbol in (column, row))
        if 2 * width < min(height, 2 * COLUMN_BLOCK):
            left, right, row, column = right, left, column, row
        over = self.scope.blocks.tiled(fold.over)
        depth = longest(over)
        others = [s for s in self.scope.tiled(*fold.args) if s not in (row, column) and s not in fold.over]
        return TiledProduct(left, right, row, column, depth, tuple(others), tuple(s for s in over if s != depth))

    def ahead(self, product: TiledProduct, closed: Collection[sympy.Symbol]) -> list[str]:
        """Return lines that pack the right factor outside loops over the axes `closed`, if all calls can share it."""
        packed = {product.depth, product.column}
        if set(self.scope.tiled(product.right)) - packed or packed.intersection(closed) or self._unpacked(product):
            return []
        return self._packed(product).lines

    def left(self, product: TiledProduct) -> tuple[list[str], str]:
        """Return lines that put the left factor into memory, and its location: pointer and two strides."""
        return self._factor(product.left, product.row, product.depth)

    def right(self, product: TiledProduct, left: str) -> Packed | Unpacked:
        """Return the right factor, for a left factor at this location."""
        unpacked = self._unpacked(product)
        if unpacked is None or (unpacked.along_depth and not left.endswith(", 1")):
            return self._packed(product)
        return unpacked

    def _unpacked(self, product: TiledProduct) -> Unpacked | None:
        """Return the right factor in memory, if the rows are few and its elements lie side by side."""
        right = product.right
        load = right.arg if isinstance(right, Cast) else right
        key = (right, product.depth, product.column)
        if right.dtype is not torch.float32 or key in self.packed or right in self.scope.known:
            return None
        if not isinstance(load, Load) or load.dtype not in ELEMENTS or self._rows(product) > self._few:
            return None
        place = self._in_place(load, (product.depth, product.column))
        if place is None:
            return None
        at, along_depth, along_columns = place.rsplit(", ", 2)
        if along_depth != "1" and along_columns != "1":
            return None
        stride = along_columns if along_depth == "1" else along_depth
        return Unpacked(ELEMENTS[load.dtype], along_depth == "1", at, stride)

    def _rows(self, product: TiledProduct) -> int:
        """Return the most rows of a block of a product."""
        if product.row is None:
            return 1
        return min(self.scope.blocks.points(product.row), length(self.scope.blocks.of[product.row].axis.size))

    def _packed(self, product: TiledProduct) -> Packed:
        """Return the packing of the right factor, without lines if it is packed already."""
        key = (product.right, product.depth, product.column)
        if key in self.packed:
            return Packed([], [], self.packed[key].name)
        scope, held = self.scope, VALUE_TYPES[product.right.dtype]
        lines, place = self._factor(product.right, product.depth, product.column)
        name = scope.space.fresh("packed")
        tile = scope.allocate(packed_tile(name, held, product.depth, product.column, scope.blocks))
        counts = f"{self._count(product.depth)}, {self._count(product.column)}"
        call = f"pack_{held}({place}, {counts}, {tile.name});"
        if set(scope.tiled(product.right)) - {product.depth, product.column}:
            return Packed(lines, [call], tile.name)
        self.packed[key] = tile
        return Packed([*lines, call], [], tile.name)

    def _factor(self, value: Expr, first: sympy.Symbol | None, second: sympy.Symbol | None) -> tuple[list[str], str]:
        """Return lines, and `pointer, stride along first, stride along second` of a factor in memory."""
        direct = self._in_place(value, (first, second))
        if direct is not None:
            return [], direct
        lines = self.scope.materialise(value)
        tile = self.scope.known[value]
        position = tile.position(self.scope.blocks, self.scope.names, (first, second))
        pointer = tile.name if position == "0" else f"{tile.name} + {position}"
        strides = (index_text(tile.stride(symbol), self.scope.names) for symbol in (first, second))
        return lines, ", ".join([pointer, *strides])

    def _in_place(self, value: Expr, inner: Sequence[sympy.Symbol | None]) -> str | None:
        """Return the location of a tensor that can be read in place; None if it must be computed."""
        if not isinstance(value, Load) or value.mask is not None or value.buffer in self.scope.written:
            return None
        offset = value.index[0]
        if isinstance(offset, Expr) or value in self.scope.known:
            return None
        known = (ZERO if symbol is None else coefficient(offset, symbol) for symbol in inner)
        strides = [stride for stride in known if stride is not None]
        if len(strides) < len(inner):
            return None
        starts = {symbol: self.scope.blocks.of[symbol].extent.first for symbol in inner if symbol is not None}
        begun = {start: start.name for start in starts.values() if isinstance(start, sympy.Symbol)}
        names = {**self.scope.names, **begun}
        position = index_text(sympy.expand_mul(offset.xreplace(starts)), names)
        return ", ".join([f"{self.scope.params[value.buffer]} + {position}", *(index_text(s, names) for s in strides)])

    def multiply(
        self, product: TiledProduct, tile: ArrayTile, left: str, right: Packed | Unpacked, *, fresh: bool
    ) -> list[str]:
        """Return the calls that accumulate the product into `tile`, or overwrite it if `fresh`."""
        position = tile.position(self.scope.blocks, self.scope.names, (product.row, product.column))
        stride = index_text(row_stride(product.column, self.scope.blocks), self.scope.names)
        counts = ", ".join(self._count(symbol) for symbol in (product.row, product.column, product.depth))
        to = f"{tile.name if position == '0' else f'{tile.name} + {position}'}, {stride}, {counts}"
        if isinstance(right, Packed):
            block = self.scope.blocks.terms(product.depth)
            lines = [*right.each, f"multiply_{tile.held}({left}, {right.name}, {to}, {block}, {int(fresh)});"]
        else:
            name, read = ("dots", left.removesuffix(", 1")) if right.along_depth else ("sums", left)
            lines = [f"{name}_{right.element}({read}, {right.place}, {right.stride}, {to}, {int(fresh)});"]
        levels, _ = self.scope.levels((*product.others, *product.deeper), lanes=False)
        levels[-1].before += lines
        return render(levels)

    def _count(self, symbol: sympy.Symbol | None) -> str:
        return "1" if symbol is None else self.scope.blocks.count(symbol)
