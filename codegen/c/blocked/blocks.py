"""Which axes of a kernel with contractions become blocks, and how large these are.

Input: a kernel; output: for each axis, how far it runs inside one program, and whether values of it are tiles.  GRID
axes that only one side of a product spans are cut into blocks, one per side: their points share what the other side
loads.  Other GRID axes (a batch) are one point per program.  Of the axes of a loop the longest is walked in blocks, the
others point by point.  WHOLE axes are in every tile from end to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy

from fusion.codegen.c.text.indices import Names, index_text
from fusion.codegen.c.text.nest import Extent, whole_extent
from fusion.codegen.c.text.products import COLUMN_BLOCK, ROW_BLOCK
from fusion.lowering.indexing import ONE
from fusion.lowering.kernel import Fold, Kernel, KernelAxis, Loop, Role, statements

MOST_ROWS = 192
"""Most rows of a program: packing the other operand of a product costs little when so many rows share it."""

FEWEST_ROWS = 24
"""Threads are not given work by making blocks smaller than this."""

COLUMNS = 192
"""Most points of a second blocked GRID axis, or of one block of a loop; with MOST_ROWS float32 rows, 1/7 of 1 MiB."""

FOOTPRINT = 1 << 16
"""Elements of a tile whose columns are held whole, however many: fewer rows then."""

MANY = 64
"""Programs that surely give every thread some."""

UNKNOWN = 1 << 20
"""What a size that is given at the call is taken for where sizes are compared."""


@dataclass(frozen=True, slots=True)
class Block:
    """How one axis runs inside a program.

    Attributes:
        extent: its loop variable and bounds.
        bound: the most points of it in a tile; None: one point at a time, tiles do not have this axis.
        header: of the loop over its blocks, or over its points where there are no blocks.
        inside: what stands first in that loop.
    """

    axis: KernelAxis
    extent: Extent
    bound: sympy.Expr | None
    header: str
    inside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a kernel, in the order of its axes, and what has to be known before the first of them.

    Attributes:
        before: lines that settle the size of a block at the launch, from the number of threads.
    """

    of: Mapping[sympy.Symbol, Block]
    before: tuple[str, ...]

    def tiled(self, symbols: Iterable[sympy.Symbol]) -> tuple[sympy.Symbol, ...]:
        """Those of `symbols` that tiles have, in the order of the kernel's axes."""
        wanted = set(symbols)
        return tuple(symbol for symbol, block in self.of.items() if symbol in wanted and block.bound is not None)

    def count(self, symbol: sympy.Symbol) -> str:
        """C text: how many points of `symbol` the current block has."""
        extent = self.of[symbol].extent
        return extent.end if extent.start == "0" else f"({extent.end} - {extent.start})"

    def points(self, symbol: sympy.Symbol) -> int:
        """About how many points of it a tile has."""
        bound = self.of[symbol].bound
        return 1 if bound is None else length(bound)


def length(size: sympy.Expr) -> int:
    """`size`, or what an unknown one is taken for."""
    return int(size) if size.is_Integer else UNKNOWN


def choose_blocks(kernel: Kernel, names: Names) -> Blocks:
    """The blocks of `kernel`, whose axes and sizes are called `names` in C."""
    spread = _spread(kernel)
    held = max((_held(kernel, stmt) for stmt in statements(kernel.body, Fold)), default=1)
    most = min(MOST_ROWS, max(2 * ROW_BLOCK, FOOTPRINT // held // ROW_BLOCK * ROW_BLOCK))
    blocked_loops = {_longest(kernel, stmt.axes) for stmt in statements(kernel.body, Loop)}
    before: list[str] = []
    found: dict[sympy.Symbol, Block] = {}
    for axis in kernel.axes:
        symbol = axis.symbol
        if axis.role is Role.WHOLE:
            found[symbol] = _end_to_end(axis, axis.size, names)
        elif symbol in spread[:1]:
            width = _even(axis.size, most, ROW_BLOCK)
            step = _settled(kernel, axis, width, names, before)
            found[symbol] = _cut(axis, width, step, names)
        elif symbol in spread or symbol in blocked_loops:
            width = _even(axis.size, COLUMNS, COLUMN_BLOCK)
            found[symbol] = _cut(axis, width, str(width), names)
        else:
            found[symbol] = _end_to_end(axis, None, names)
    return Blocks(found, tuple(before))


def _spread(kernel: Kernel) -> list[sympy.Symbol]:
    """The GRID axes to be cut: at most one that products take as rows, and one that they take as columns."""
    grid = {axis.symbol: axis for axis in kernel.with_role(Role.GRID)}
    chosen: list[sympy.Symbol] = []
    dots = [stmt for stmt in statements(kernel.body, Fold) if stmt.op == "dot"]
    for dot in dots:
        for side in (dot.rows, dot.columns):
            own = [symbol for symbol in side if symbol in grid]
            if own and not set(own) & set(chosen):
                chosen.append(max(reversed(own), key=lambda symbol: length(grid[symbol].size)))
    if not dots and grid:
        chosen.append(list(grid)[-1])
    return chosen


def _held(kernel: Kernel, fold: Fold) -> int:
    """The points of WHOLE axes that the result of `fold` has per row, or its arguments where they are not loaded."""
    sizes = {axis.symbol: length(axis.size) for axis in kernel.with_role(Role.WHOLE)}
    result = 1
    for symbol in (*fold.rows, *fold.columns):
        result *= sizes.get(symbol, 1)
    return max(1, result)


def _longest(kernel: Kernel, axes: tuple[sympy.Symbol, ...]) -> sympy.Symbol:
    sizes = kernel.axis_sizes()
    return max(reversed(axes), key=lambda symbol: length(sizes[symbol]))


def _even(size: sympy.Expr, most: int, multiple: int) -> int:
    """The width of the widest equal blocks of `size` points that are no wider than `most`, as a multiple."""
    most = max(multiple, most // multiple * multiple)
    if not size.is_Integer:
        return most
    parts = max(1, -(-int(size) // most))
    return max(1, -(-int(size) // parts // multiple)) * multiple


def _settled(kernel: Kernel, axis: KernelAxis, width: int, names: Names, before: list[str]) -> str:
    """C text of the width of row blocks: narrower ones at the launch, where that leaves threads without work."""
    points = sympy.Mul(ONE, *(other.size for other in kernel.with_role(Role.GRID)))
    if width <= FEWEST_ROWS or (points.is_Integer and points >= MANY * width):
        return str(width)
    name = f"{names[axis.symbol]}_step"
    share = f"({index_text(points, names)}) / (2 * threads) / {ROW_BLOCK} * {ROW_BLOCK}"
    before.append(f"const int64_t {name} = imax({FEWEST_ROWS}, imin({width}, {share}));")
    return name


def _end_to_end(axis: KernelAxis, bound: sympy.Expr | None, names: Names) -> Block:
    extent = whole_extent(axis.symbol, axis.size, names)
    return Block(axis, extent, bound, extent.header)


def _cut(axis: KernelAxis, width: int, step: str, names: Names) -> Block:
    name, size = names[axis.symbol], index_text(axis.size, names)
    start, end = f"{name}_0", f"{name}_end"
    extent = Extent(name, start, end, str(width), f"{name} - {start}")
    header = f"for (int64_t {start} = 0; {start} < {size}; {start} += {step})"
    inside = f"const int64_t {end} = imin({start} + {step}, {size});"
    return Block(axis, extent, sympy.Integer(width), header, (inside,))
