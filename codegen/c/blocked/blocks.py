"""Decides which axes of a kernel with contractions are blocked, and the block sizes.

Input: a kernel; output: for each axis its range inside one program, and whether values along it are tiles.  GRID axes
that only one side of a product spans are blocked, one per side: their points share the loads of the other side.  So are
axes of an outer loop over which folds inside an inner one run.  Other GRID axes (a batch) are one point per program.
Of the axes of a loop the longest is blocked, the others run point by point.  WHOLE axes are in every tile in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import sympy

from fusion.codegen.c.text.indices import Names, index_text
from fusion.codegen.c.text.nest import Extent, block_extent, whole_extent
from fusion.codegen.c.text.products import COLUMN_BLOCK, PART, ROW_BLOCK
from fusion.lowering.indexing import ONE
from fusion.lowering.ir.kernel import Fold, Kernel, KernelAxis, Loop, Role, outer_axes, statements

MOST_BLOCK_ROWS = 192
"""Most rows of a program: packing the other operand of a product costs little when this many rows share it."""

FEWEST_ROWS = 24
"""Least rows of a block that is divided to give threads work."""

MOST_BLOCK_COLUMNS = 192
"""Most points of a second blocked GRID axis, or of one block of a loop; with `MOST_BLOCK_ROWS` float32 rows, 1/7 of
1 MiB."""

FOOTPRINT = 1 << 16
"""Elements of a tile with all of its columns, however many: fewer rows then."""

MANY_PROGRAMS = 64
"""A number of programs that gives every thread some."""

UNKNOWN = 1 << 20
"""The assumed value of sizes that are known only at the call, in comparisons."""


@dataclass(frozen=True, slots=True)
class Block:
    """Describes the loop of one axis inside a program.

    Attributes:
        extent: its loop variable and bounds.
        bound: the most points of it in a tile; None: one point at a time, tiles do not have this axis.
        header: of the loop over its blocks, or over its points if it is not blocked.
        inside: the first lines in that loop.
    """

    axis: KernelAxis
    extent: Extent
    bound: sympy.Expr | None
    header: str
    inside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a kernel, in the order of its axes.

    Attributes:
        before: lines before the first block that compute a block size at launch, from the number of threads.
        rows: the axis whose blocks are rows of products; None if no axis is.
        step: the C name or text of the width of its blocks.
        multiple: that blocks of columns and of loops have the width of.
    """

    of: Mapping[sympy.Symbol, Block]
    before: tuple[str, ...]
    rows: sympy.Symbol | None = None
    step: str = ""
    multiple: int = COLUMN_BLOCK

    def tiled(self, symbols: Iterable[sympy.Symbol]) -> tuple[sympy.Symbol, ...]:
        """Return the axes of tiles in `symbols`, in the order of the kernel's axes."""
        wanted = set(symbols)
        return tuple(symbol for symbol, block in self.of.items() if symbol in wanted and block.bound is not None)

    def count(self, symbol: sympy.Symbol) -> str:
        """Return the C text of the number of points of `symbol` in the current block."""
        extent = self.of[symbol].extent
        return extent.end if extent.start == "0" else f"({extent.end} - {extent.start})"

    def terms(self, symbol: sympy.Symbol | None) -> int:
        """Return the number of terms of a sum along an axis that one partial sum takes, for an axis of any role."""
        return 1 if symbol is None else _even(self.of[symbol].axis.size, MOST_BLOCK_COLUMNS, self.multiple)

    def points(self, symbol: sympy.Symbol) -> int:
        """Return about how many points of an axis a tile has."""
        bound = self.of[symbol].bound
        return 1 if bound is None else length(bound)


def length(size: sympy.Expr) -> int:
    """Return `size`, or the assumed value of an unknown one."""
    return int(size) if size.is_Integer else UNKNOWN


def choose_blocks(kernel: Kernel, names: Names) -> Blocks:
    """Return the blocks of `kernel`, whose axes and sizes are called `names` in C."""
    spread = _spread(kernel)
    held = max((_held(kernel, stmt) for stmt in statements(kernel.body, Fold)), default=1)
    most = min(MOST_BLOCK_ROWS, max(2 * ROW_BLOCK, FOOTPRINT // held // ROW_BLOCK * ROW_BLOCK))
    blocked_loops = {_longest(kernel, stmt.axes) for stmt in statements(kernel.body, Loop)}
    before: list[str] = []
    step = ""
    skipping = any(loop.where is not None for loop in statements(kernel.body, Loop))
    multiple = PART if skipping else COLUMN_BLOCK
    blocks: dict[sympy.Symbol, Block] = {}
    for axis in kernel.axes:
        symbol = axis.symbol
        if axis.role is Role.WHOLE:
            blocks[symbol] = _end_to_end(axis, axis.size, names)
        elif symbol in spread[:1]:
            width = _even(axis.size, most, PART if skipping else ROW_BLOCK)
            step = _row_width(kernel, axis, width, names, before, skipping=skipping)
            blocks[symbol] = _cut(axis, width, step, names)
        elif symbol in spread or symbol in blocked_loops:
            width = _even(axis.size, MOST_BLOCK_COLUMNS, multiple)
            blocks[symbol] = _cut(axis, width, str(width), names)
        else:
            blocks[symbol] = _end_to_end(axis, None, names)
    return Blocks(blocks, tuple(before), next(iter(spread), None), step, multiple)


def programs(kernel: Kernel) -> int:
    """Return how many programs share the work of a kernel, if its threads are many."""
    spread = _spread(kernel)
    widths = {**dict.fromkeys(spread, MOST_BLOCK_COLUMNS), **dict.fromkeys(spread[:1], FEWEST_ROWS)}
    return prod(-(-length(axis.size) // widths.get(axis.symbol, 1)) for axis in kernel.with_role(Role.GRID))


def _spread(kernel: Kernel) -> list[sympy.Symbol]:
    """Return the GRID axes to block, or outer ones: at most one for the rows of products, and one for their columns."""
    outer = outer_axes(kernel)
    grid = {axis.symbol: axis for axis in kernel.axes if axis.role is Role.GRID or axis.symbol in outer}
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
    """Return the number of WHOLE points per row in the result of `fold`."""
    sizes = {axis.symbol: length(axis.size) for axis in kernel.with_role(Role.WHOLE)}
    result = 1
    for symbol in (*fold.rows, *fold.columns):
        result *= sizes.get(symbol, 1)
    return max(1, result)


def _longest(kernel: Kernel, axes: tuple[sympy.Symbol, ...]) -> sympy.Symbol:
    sizes = kernel.axis_sizes()
    return max(reversed(axes), key=lambda symbol: length(sizes[symbol]))


def _even(size: sympy.Expr, most: int, multiple: int) -> int:
    """Return the width of the widest equal blocks of `size` points not wider than `most`, as a multiple."""
    most = max(multiple, most // multiple * multiple)
    if not size.is_Integer:
        return most
    parts = max(1, -(-int(size) // most))
    return max(1, -(-int(size) // parts // multiple)) * multiple


def _row_width(kernel: Kernel, axis: KernelAxis, width: int, names: Names, before: list[str], *, skipping: bool) -> str:
    """Return C text of the width of row blocks: narrower at launch if threads would have no work.

    It is a variable also where a loop skips points, so that `row_steps` may change it.
    """
    points = sympy.Mul(ONE, *(other.size for other in kernel.with_role(Role.GRID)))
    name = f"{names[axis.symbol]}_step"
    busy = points.is_Integer and points >= MANY_PROGRAMS * width
    if width <= FEWEST_ROWS or busy or axis.role is Role.LOOP:
        if not skipping:
            return str(width)
        before.append(f"int64_t {name} = {width};")
        return name
    share = f"({index_text(points, names)}) / (2 * threads) / {ROW_BLOCK} * {ROW_BLOCK}"
    before.append(f"{'' if skipping else 'const '}int64_t {name} = imax({FEWEST_ROWS}, imin({width}, {share}));")
    return name


def _end_to_end(axis: KernelAxis, bound: sympy.Expr | None, names: Names) -> Block:
    extent = whole_extent(axis.symbol, axis.size, names)
    return Block(axis, extent, bound, extent.header)


def _cut(axis: KernelAxis, width: int, step: str, names: Names) -> Block:
    name, size = names[axis.symbol], index_text(axis.size, names)
    start, end = f"{name}_0", f"{name}_end"
    extent = block_extent(name, start, end, width)
    header = f"for (int64_t {start} = 0; {start} < {size}; {start} += {step})"
    inside = f"const int64_t {end} = imin({start} + {step}, {size});"
    most = (
        min(width, int(axis.size)) if axis.size.is_Integer else width
    )  # tiles of few points stay in the nearest cache
    return Block(axis, extent, sympy.Integer(most), header, (inside,))
