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
from fusion.lowering.ir.kernel import Fold, Role

LONGEST_TERMS = 1 << 12
"""The longest axis of a loop whose positions are tabulated before it: 32 KiB."""


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
        before: lines before all loops.
        tables: a loop's axis, and what is tabulated for each of its points → the table.

    Args:
        few: rows up to which the right factor is read in place.
    """

    def __init__(self, scope: TileScope, few: int) -> None:
        self.scope, self._few = scope, few
        self.packed: dict[tuple[Expr, sympy.Symbol | None, sympy.Symbol | None], ArrayTile] = {}
        self.before: list[str] = []
        self.tables: dict[tuple[sympy.Symbol, sympy.Expr], str] = {}

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

    def begins(self, fold: Fold) -> str:
        """Return the C condition that a streamed product begins; "" if its tile has to be cleared before."""
        blocks = self.scope.blocks
        if not blocks.streamed or fold.op != "dot" or self.product(fold).deeper:
            return ""
        block = blocks.of[fold.over[0]]
        return f"{block.extent.start} == 0" if block.axis.size.is_Integer and block.axis.size > 0 else ""

    def ahead(self, product: TiledProduct, closed: Collection[sympy.Symbol]) -> list[str]:
        """Return lines that pack the right factor outside loops over the axes `closed`, if all calls can share it."""
        packed = {product.depth, product.column}
        if set(self.scope.tiled(product.right)) - packed or packed.intersection(closed) or self._unpacked(product):
            return []
        return self.packed_right(product).lines

    def left(self, product: TiledProduct) -> tuple[list[str], str]:
        """Return lines that put the left factor into memory, and its location: pointer and two strides."""
        return self._factor(product.left, product.row, product.depth)

    def right(self, product: TiledProduct, left: str) -> Packed | Unpacked:
        """Return the right factor, for a left factor at this location."""
        unpacked = self._unpacked(product)
        if unpacked is None or (unpacked.along_depth and not left.endswith(", 1")):
            return self.packed_right(product)
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

    def packed_right(self, product: TiledProduct) -> Packed:
        """Return the packing of the right factor, without lines if it is packed already."""
        key = (product.right, product.depth, product.column)
        if key in self.packed:
            return Packed([], [], self.packed[key].name)
        scope, held = self.scope, VALUE_TYPES[product.right.dtype]
        apart = self._apart(product)
        function = "pack" if apart is None else "pack_apart"
        lines, place = apart or self._factor(product.right, product.depth, product.column)
        name = scope.space.fresh("packed")
        tile = scope.allocate(packed_tile(name, held, product.depth, product.column, scope.blocks))
        counts = f"{self._count(product.depth)}, {self._count(product.column)}"
        call = f"{function}_{held}({place}, {counts}, {tile.name});"
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

    def _apart(self, product: TiledProduct) -> tuple[list[str], str] | None:
        """Return lines that tabulate where the terms and the columns of the right factor lie, and the place of it.

        The place is the text of its first element and of both tables.  None if it can be read in place, or if the
        position of an element is no sum of such numbers.
        """
        right, over, column = product.right, product.depth, product.column
        if over is None or column is None or self._in_place(right, (over, column)) is not None:
            return None
        if not isinstance(right, Load) or right.mask is not None or right in self.scope.known:
            return None
        if right.buffer in self.scope.written or isinstance(right.index[0], Expr) or product.others or product.deeper:
            return None
        parts: dict[frozenset[sympy.Basic], sympy.Expr] = {}
        for term in sympy.Add.make_args(sympy.expand_mul(right.index[0])):
            along = frozenset(term.free_symbols & {over, column})
            parts[along] = parts.get(along, ZERO) + term
        if len(parts) > len({*parts} & {frozenset(), frozenset({over}), frozenset({column})}):
            return None
        first = index_text(parts.get(frozenset(), ZERO), self.scope.names)
        terms, places = (parts.get(frozenset({symbol}), ZERO) for symbol in (over, column))
        lines, table = self._tabulated(over, terms)
        more, place = self._tabulated(column, places)
        return [*lines, *more], f"{self.scope.params[right.buffer]} + {first}, {table}, {place}"

    def _tabulated(self, symbol: sympy.Symbol, value: sympy.Expr) -> tuple[list[str], str]:
        """Return lines that tabulate a number for each point of a block, and its place: before all loops, if it can."""
        axis, extent, text = self.scope.blocks.of[symbol].axis, self.scope.blocks.of[symbol].extent, ""
        text = index_text(value, self.scope.names)
        if axis.role is Role.LOOP and axis.size.is_Integer and axis.size <= LONGEST_TERMS:
            if (symbol, value) not in self.tables:
                self.tables[symbol, value] = name = self.scope.space.fresh("terms")
                self.before.append(f"int64_t {name}[{axis.size}];")
                self.before.append(f"for (int64_t {extent.name} = 0; {extent.name} < {axis.size}; {extent.name}++)")
                self.before.append(f"    {name}[{extent.name}] = {text};")
            return [], f"{self.tables[symbol, value]} + {extent.start}"
        bound = self.scope.blocks.of[symbol].bound
        assert bound is not None
        tile = self.scope.allocate(ArrayTile(self.scope.space.fresh("places"), "int64_t", (), (), bound))
        return [f"{extent.header} {tile.name}[{extent.slot}] = {text};"], tile.name

    def multiply(
        self, product: TiledProduct, tile: ArrayTile, left: str, right: Packed | Unpacked, *, fresh: str
    ) -> list[str]:
        """Return the calls that accumulate the product into `tile`, or overwrite it where `fresh` is true in C."""
        position = tile.position(self.scope.blocks, self.scope.names, (product.row, product.column))
        stride = index_text(row_stride(product.column, self.scope.blocks), self.scope.names)
        counts = ", ".join(self._count(symbol) for symbol in (product.row, product.column, product.depth))
        to = f"{tile.name if position == '0' else f'{tile.name} + {position}'}, {stride}, {counts}"
        if isinstance(right, Packed):
            block = self.scope.blocks.terms(product.depth)
            lines = [*right.each, f"multiply_{tile.held}({left}, {right.name}, {to}, {block}, {fresh});"]
        else:
            name, read = ("dots", left.removesuffix(", 1")) if right.along_depth else ("sums", left)
            lines = [f"{name}_{right.element}({read}, {right.place}, {right.stride}, {to}, {fresh});"]
        levels, _ = self.scope.levels((*product.others, *product.deeper), lanes=False)
        levels[-1].before += lines
        return render(levels)

    def multiply_into(self, product: TiledProduct, place: str, left: str, right: Packed, *, fresh: str) -> list[str]:
        """Return the call that accumulates the product in a tensor, of which it writes only elements of the product.

        Args:
            place: the text of its first element, and of the distance between its rows.
            fresh: C text; where it is true, the product overwrites what is there.
        """
        counts = ", ".join(self._count(symbol) for symbol in (product.row, product.column, product.depth))
        block, held = self.scope.blocks.terms(product.depth), VALUE_TYPES[product.right.dtype]
        call = f"multiply_into_{held}({left}, {right.name}, {place}, {counts}, {block}, {fresh});"
        return [*right.each, call]

    def _count(self, symbol: sympy.Symbol | None) -> str:
        return "1" if symbol is None else self.scope.blocks.count(symbol)
