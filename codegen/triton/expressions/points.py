"""Computes the indices of a block along its dimensions, and its masks, as lines of Triton.

Input: a layout and the start of the current block; output: tiles of indices and of masks, each computed once.  A
dimension in which the current block is known to be full needs no mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import sympy

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.expressions.code import AND, COMPARE, PRODUCT, SUM, Code, Operand, compose, listed
from fusion.codegen.triton.expressions.indices import Layout, expand, index_code, start_symbol
from fusion.codegen.triton.expressions.scopes import Identifiers, Lines, Tile
from fusion.lowering.ir.expr import TileRef


class Points(Lines):
    """Emits indices and their bounds as lines of a kernel."""

    def __init__(self, layout: Layout, names: Identifiers) -> None:
        super().__init__(names)
        self.layout = layout
        self.row_layout: Operand | None = None  # Gluon layout of one-dimensional tiles filled with a number, if needed
        self.starts: dict[Dim, Code] = {}  # the first index of a program's or an iteration's block
        self.full: frozenset[Dim] = frozenset()  # dimensions whose current block is known not to reach past the end

    def index(self, dim: Dim) -> Tile:
        """Return the indices of the block of `dim`."""
        known = self.find(("index", dim))
        if known is not None:
            return known
        depth, start = self.layout.depth[dim], self.starts.get(dim)
        is_tile = dim in self.layout.tiled
        code = start
        if is_tile:
            code = compose("tl.arange(0, {})", self.layout.width(dim))
            if start is not None:
                code = compose("{} + {}", start, code)
            # A start that is cast where it is computed makes the sum an int64.
            if dim in self.layout.wide and not (start is not None and start.wide):
                code = compose("({}).to(tl.int64)", code)
        assert code is not None, f"{dim.name} has no start"
        tile = Tile(code, (dim,) if is_tile else (), depth)
        if not tile.code.is_name:
            tile = self.name(dim.symbol.name, tile)
        return self.bind(("index", dim), tile)

    def shift(self, dim: Dim) -> Code:
        """Return the first index of a row in a shifted loop."""
        known = self.find(("shift", dim)) or self.bind(
            ("shift", dim), self.name(f"{dim.name}_shift", self.index_tile(dim.shift))
        )
        return known.code

    def mask(self, dim: Dim, word: int = 1) -> Tile:
        """Return the mask of the indices of a block that lie within `dim`; with `word`, within the words (of `word`
        elements) that contain an element of it.
        """
        known = self.find(("mask", dim, word))
        if known is not None:
            return known
        index = self.index(dim)
        if word > 1:
            code = compose("{} < {}", index.code, self._end_of_words(dim, word), binds=COMPARE)
            return self.bind(("mask", dim, word), self.name(f"{dim.name}_words", replace(index, code=code)))
        limit = self.index_tile(dim.size).code.at(COMPARE + 1)
        code = compose("{} < {}", index.code, limit, binds=COMPARE)
        if dim.shift != 0:
            start = self.shift(dim)
            code = compose("({0} >= {1}) & ({0} < {1} + {2})", index.code, start, limit, binds=AND)
        return self.bind(("mask", dim, word), self.name(f"{dim.name}_mask", replace(index, code=code)))

    def _end_of_words(self, dim: Dim, word: int) -> Operand:
        """Return the index at which the last word of a row ends."""
        if dim.shift == 0:
            return -(-int(dim.size) // word) * word
        return compose("({0} + {1}) // {2} * {2}", self.shift(dim), int(dim.size) + word - 1, word)

    def whole_words(self, dim: Dim, word: int) -> Tile:
        """Return the mask of the words, of `word` elements, of which all elements lie within `dim`."""
        known = self.find(("whole words", dim, word))
        if known is not None:
            return known
        index, limit = self.index(dim), self.index_tile(dim.size).code.at(SUM)
        if dim.shift == 0:
            code = compose("{} < {} // {} * {}", index.code, limit.at(PRODUCT), word, word, binds=COMPARE)
        else:
            start = self.shift(dim)
            first = compose("({} + {}) // {} * {}", start, word - 1, word, word, binds=PRODUCT)
            last = compose("({} + {}) // {} * {}", start, limit, word, word, binds=PRODUCT)
            code = compose("({0} >= {1}) & ({0} < {2})", index.code, first, last, binds=AND)
        return self.bind(("whole words", dim, word), self.name(f"{dim.name}_whole", replace(index, code=code)))

    def masks(self, dims: Sequence[Dim], more: Tile | None = None) -> Tile | None:
        """Return the mask of a tile over `dims`: inside all of them, and `more` holds; None if always true."""
        edges = tuple(dim for dim in dims if self.is_edge(dim))
        inside = self.find(("masks", edges))
        if inside is None and edges:
            inside = self._both([self.mask(dim) for dim in edges])
            if len(edges) > 1:
                inside = self.name("mask", inside)
            self.bind(("masks", edges), inside)
        if inside is None or more is None:
            return inside or more
        return self._both([inside, more])

    def is_edge(self, dim: Dim) -> bool:
        """Return whether the current block of `dim` can extend past its end."""
        return self.layout.masked(dim) and dim not in self.full

    def _both(self, parts: Sequence[Tile]) -> Tile:
        wants = self.join(part.dims for part in parts)
        codes = [expand(part.code, part.dims, wants) for part in parts]
        code = codes[0] if len(codes) == 1 else listed((c.at(AND + 1) for c in codes), " & ", AND)
        return Tile(code, wants, max(part.depth for part in parts))

    def join(self, spans: Iterable[Sequence[Dim]]) -> tuple[Dim, ...]:
        """Return the union of dimensions, in tile order; lanes stay as they are where nothing else is present."""
        union = {dim for span in spans for dim in span}
        return tuple(dim for dim in self.layout.blocked.dims if dim in union) or tuple(union)

    def index_tile(self, index: sympy.Expr) -> Tile:
        """Return an index expression as a tile."""
        depth = max((self.layout.depth[dim] for dim in self.layout.within(index)), default=0)
        index = self.layout.by_block(index)
        return Tile(index_code(index, self.layout, self._variable), self.layout.spanned(index), depth)

    def _variable(self, symbol: sympy.Symbol) -> Operand:
        dim = self.layout.dim(symbol)
        if dim is not None:
            return self.index(dim).code
        return next((start for dim, start in self.starts.items() if start_symbol(dim) == symbol), symbol.name)

    def filled(self, dims: Sequence[Dim], number: Operand, dtype: str) -> Code:
        """Return a tile in which each element is `number`."""
        arguments = [self.layout.shape(dims), number, dtype]
        return compose("tl.full({})", listed(arguments if self.row_layout is None else [*arguments, self.row_layout]))

    def broadcast(self, tile: Tile, dims: Sequence[Dim]) -> Tile:
        """Return `tile`, which has a type, broadcast to a full tile over `dims`."""
        if tile.dims == tuple(dims):
            return tile
        code = expand(tile.code, tile.dims, dims)
        code = compose("tl.broadcast_to({}, {})", code, self.layout.shape(dims))
        return replace(tile, code=code, dims=tuple(dims))

    def forget(self, dim: Dim) -> None:
        """Drop the indices of `dim` and the values that depend on them: another layout needs its own."""
        for scope in self.scopes:
            for key in [key for key, tile in scope.known.items() if dim in tile.dims and not isinstance(key, TileRef)]:
                del scope.known[key]
