"""Tracks which values are in tiles while a kernel is written, and writes the loop nests that fill tiles.

A value that is in a tile is read from it in the whole scope.  Costly values get tiles if a nest would recompute them;
tiles that several statements share are stored by the first nest with all of their axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import sympy

from fusion.codegen.c.blocked.blocks import MOST_BLOCK_COLUMNS, choose_blocks
from fusion.codegen.c.blocked.held import ArrayTile, tile_over
from fusion.codegen.c.frame import Frame
from fusion.codegen.c.plan.scratch import WORTH_KEEPING, outermost
from fusion.codegen.c.plan.threads import cost_of
from fusion.codegen.c.text.code import Code, element_of
from fusion.codegen.c.text.nest import Level, indented, render
from fusion.codegen.c.text.products import COLUMN_BLOCK
from fusion.codegen.c.text.storage import VALUE_TYPES, loaded
from fusion.codegen.c.text.values import CHOICES, ValueWriter
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Expr, Load, Op, TileRef, postorder
from fusion.lowering.ir.kernel import Kernel, Loop, Stmt, spans, statements, values_of


@dataclass(frozen=True, slots=True)
class Nest:
    """A loop nest that is being written.

    Attributes:
        levels: the level outside of all loops, then each loop, innermost last.
        texts: the code of the requested values, in the innermost loop.
    """

    levels: list[Level]
    texts: Sequence[Code]
    _writer: ValueWriter

    def position(self, offset: sympy.Expr) -> Code:
        """Return an offset in a flat buffer, in the innermost loop."""
        return self._writer.position(offset)

    def write(self, *statements: str) -> None:
        """Add statements to the innermost loop."""
        self.levels[-1].before += statements

    def lines(self) -> list[str]:
        """Return the nest as written so far."""
        return render(self.levels)


class TileScope:
    """The tiles of one kernel and their contents at the current statement.

    Attributes:
        where: the axes of each expression.
        blocks: the range of each axis.
        written: params that are mutated: values loaded from them are not kept.
        tiles: all tiles that one thread allocates.
        spare: those among them that hold nothing where the current statement runs.
        known: values that are in tiles → their tiles.
        shared: values that several statements of the scope need.
        outside: values whose tiles outlive the scope.
        later: values that the statements after the current one need.
    """

    def __init__(self, kernel: Kernel, frame: Frame) -> None:
        self.space, self.names, self.params = frame.space, frame.names, frame.params
        self.where = dict(spans(kernel))
        self.blocks = choose_blocks(kernel, self.names)
        self.written = frozenset(param.name for param in kernel.params if param.written)
        self.tiles: list[ArrayTile] = []
        self.spare: list[ArrayTile] = []
        self.known: dict[Expr, ArrayTile] = {}
        self.shared: frozenset[Expr] = frozenset()
        self.outside: frozenset[Expr] = frozenset()
        self.later: tuple[Expr, ...] = ()

    def tiled(self, *values: Expr) -> tuple[sympy.Symbol, ...]:
        """Return the axes that a tile of `values` has."""
        return self.blocks.tiled(symbol for value in values for symbol in self.where[value])

    def worth_keeping(self, node: Expr) -> bool:
        """Return whether a tile of `node` saves work, and stays valid until the scope ends."""
        if not self.tiled(node) or isinstance(node, TileRef):
            return False
        cost = 0
        for part in self._unknown([node]):
            if isinstance(part, Load):
                if part.buffer in self.written:
                    return False
                continue
            cost += cost_of(part) if self.tiled(part) else 0
        return cost >= WORTH_KEEPING

    def _unknown(self, roots: Sequence[Expr]) -> Iterator[Expr]:
        """Yield the parts of `roots` that are not in tiles."""
        seen: set[Expr] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node not in seen and node not in self.known:
                seen.add(node)
                yield node
                stack.extend(node.children())

    def allocate(self, tile: ArrayTile) -> ArrayTile:
        """Register `tile` for allocation by every thread, and return it, or return it in place of a spare one."""
        fitting = [spare for spare in self.spare if (spare.held, spare.count) == (tile.held, tile.count)]
        if not fitting:
            self.tiles.append(tile)
            return tile
        spare = max(fitting, key=lambda other: _stem(other) == _stem(tile))  # the first of those with its stem, if any
        self.spare.remove(spare)
        return replace(tile, name=spare.name)

    def at(self, tile: ArrayTile) -> Code:
        """Return the element of `tile` at the current point."""
        return tile.element(self.blocks, self.names)

    def fill(self, tile: ArrayTile, value: Code) -> list[str]:
        """Return lines that put `value` into every element of `tile`."""
        levels, _ = self.levels(tile.axes, lanes=True)
        levels[-1].before.append(f"{self.at(tile)} = {value};")
        return render(levels)

    def materialise(self, node: Expr) -> list[str]:
        """Return lines that put a value into a tile, unless it is in one."""
        if node in self.known:
            return []
        axes = self.order(self.tiled(node), [node])
        lines = self.parts([node], axes)
        nest = self.nest([node], axes)
        if node not in self.known:  # the nest stores it if several statements need it
            tile = self._tile(node, axes)
            nest.write(f"{self.at(tile)} = {nest.texts[0]};")
            self.known[node] = tile
        return [*lines, *nest.lines()]

    def parts(self, roots: Sequence[Expr], axes: Sequence[sympy.Symbol]) -> list[str]:
        """Return lines that compute tiles for costly parts of `roots` that a nest over `axes` would recompute."""
        span = set(axes)
        lines: list[str] = []

        def smaller(node: Expr) -> bool:
            return set(self.tiled(node)) < span and self.worth_keeping(node)

        for node in outermost(roots, set(self.known), smaller):
            lines += self.materialise(node)
        return lines

    def _tile(self, node: Expr, axes: Sequence[sympy.Symbol]) -> ArrayTile:
        return self.allocate(tile_over(self.space.fresh("tile"), VALUE_TYPES[node.dtype], axes, self.blocks))

    def nest(
        self,
        roots: Sequence[Expr],
        axes: Sequence[sympy.Symbol],
        *,
        named: frozenset[Expr] = frozenset(),
        lanes: bool = True,
    ) -> Nest:
        """Return a nest over `axes`, innermost last, that computes `roots`, those in `named` as named variables.

        Shared values that have all the axes are stored to tiles on the way.
        """
        passing = self._passing(roots, set(axes))
        levels, depth = self.levels(axes, lanes=lanes)
        writer = ValueWriter(self.where, self.space, self.names, self.params, self.written)
        writer.open(levels, depth)
        for value, tile in self.known.items():
            writer.learn(value, self.at(tile))
        if axes and lanes:
            self._widen([*passing, *roots], axes[-1], levels, writer)
        texts = writer.write([*passing, *roots], named=named.union(passing))
        nest = Nest(levels, texts[len(passing) :], writer)
        for node, text in zip(passing, texts, strict=False):
            last = self._last_read(node, [*passing, *roots])
            tile = self._tile(node, axes) if last is None else self.known.pop(last)
            nest.write(f"{self.at(tile)} = {text};")
            self.known[node] = tile
        return nest

    def _passing(self, roots: Sequence[Expr], span: set[sympy.Symbol]) -> list[Expr]:
        """Return the shared values over `span` that a nest of `roots` stores: also those inside others that later
        statements read by themselves, before these others.
        """

        def is_stored(node: Expr) -> bool:
            return node in self.shared and set(self.tiled(node)) == span

        passing = outermost(roots, set(self.known), is_stored)
        inside = set(postorder(*passing))
        later = outermost(self.later, {*self.known, *passing}, is_stored)
        return [*(node for node in later if node in inside), *passing]

    def _last_read(self, node: Expr, roots: Sequence[Expr]) -> Expr | None:
        """Return a tile value whose last reader is `node`, so that `node` may overwrite it; None if there is none.

        `roots` are all values of the nest, in which `node` has a name.
        """
        span, needed = set(self.tiled(node)), self._read([*roots, *self.later], beside=node)
        for value in self._read([node]):
            tile = self.known[value]
            fits = set(tile.axes) == span and tile.held == VALUE_TYPES[node.dtype]
            if fits and value not in self.outside and value not in needed:
                return value
        return None

    def _read(self, roots: Sequence[Expr], beside: Expr | None = None) -> dict[Expr, None]:
        """Return the tile values that `roots` are computed from, without the operands of `beside`, if given."""
        found: dict[Expr, None] = {}
        seen: set[Expr] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in seen or node == beside:
                continue
            seen.add(node)
            if node in self.known:
                found[node] = None
            else:
                stack.extend(node.children())
        return found

    def _widen(self, roots: Sequence[Expr], lane: sympy.Symbol, levels: Sequence[Level], writer: ValueWriter) -> None:
        """Read numbers of fewer than 4 bytes along the lanes into an array before the loop.

        Lanes would be as many as such numbers fill a register, 64 flags of a mask beside four registers of scores.
        GCC computes the remainder, up to half as many, one element at a time, with a branch for each choice: of
        blocks of 176 scores, the last 16 took as long as the other 160.
        """
        block = self.blocks.of[lane]
        if block.bound is None or not block.bound.is_Integer or block.bound > MOST_BLOCK_COLUMNS:
            return
        parts = list(self._unknown(roots))
        operations = [node for node in parts if isinstance(node, Op)]
        if sum(map(cost_of, operations)) < WORTH_KEEPING and not any(node.name in CHOICES for node in operations):
            return
        narrow: list[tuple[Load, Code]] = []
        for load in parts:
            if not isinstance(load, Load) or load.mask is not None or load.buffer in self.written:
                continue
            if not isinstance(load.index[0], Expr) and coefficient(load.index[0], lane) == 1:
                narrow.append((load, element_of(self.params[load.buffer], writer.position(load.index[0]))))
        tiles = ((load, self.known[load]) for load in self._read(roots) if isinstance(load, Load))
        narrow += [(load, self.at(tile)) for load, tile in tiles if tile.stride(lane) == 1]
        for load, element in narrow:
            if load.dtype.itemsize < 4:
                wide = self.space.fresh("wide")
                widened = element_of(wide, block.extent.slot)
                levels[-2].before += [
                    f"int32_t {wide}[{block.bound}];",
                    levels[-1].pragma,
                    block.extent.header,
                    *indented([f"{widened} = {element};"]),
                ]
                writer.learn_here(load, loaded(load.dtype, widened))

    def levels(self, axes: Sequence[sympy.Symbol], *, lanes: bool) -> tuple[list[Level], dict[sympy.Symbol, int]]:
        """Return empty loops over `axes`, the last one over SIMD `lanes` or not, and the level of each."""
        levels = [Level(), *(Level(self.blocks.of[symbol].extent.header) for symbol in axes)]
        if axes and lanes:
            levels[-1].pragma = "#pragma omp simd"
        return levels, {symbol: k + 1 for k, symbol in enumerate(axes)}

    def order(
        self,
        axes: Sequence[sympy.Symbol],
        roots: Sequence[Expr],
        stored: Sequence[sympy.Expr] = (),
        folded: frozenset[sympy.Symbol] = frozenset(),
    ) -> tuple[sympy.Symbol, ...]:
        """Return `axes` in loop order: last the one along which most loads and `stored` offsets are contiguous."""
        scores = dict.fromkeys(axes, 0)

        def count(stride: sympy.Expr | None, symbol: sympy.Symbol, weight: int) -> None:
            scores[symbol] += 0 if stride == 0 else weight if stride == 1 else -weight

        for node in postorder(*roots):
            if isinstance(node, Load) and node not in self.known and not isinstance(node.index[0], Expr):
                for symbol in axes:
                    count(coefficient(node.index[0], symbol), symbol, 1)
            elif node in self.known:
                for symbol in axes:
                    count(self.known[node].stride(symbol), symbol, 1)
        for offset in stored:
            for symbol in axes:
                count(coefficient(offset, symbol), symbol, 2)
        if not axes:
            return ()
        lane = max(reversed(axes), key=lambda symbol: (scores[symbol], min(self.blocks.points(symbol), COLUMN_BLOCK)))
        rest = sorted((symbol for symbol in axes if symbol != lane), key=lambda symbol: symbol in folded)
        return (*rest, lane)


def _stem(tile: ArrayTile) -> str:
    return tile.name.rstrip("_0123456789")


def read_by(body: Sequence[Stmt]) -> list[Expr]:
    """Return the values that statements, and those in their loops, evaluate."""
    values = [value for stmt in statements(body) for value in values_of(stmt)]
    return values + [loop.where for loop in statements(body, Loop) if loop.where is not None]
