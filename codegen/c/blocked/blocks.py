"""Decides which axes of a kernel with contractions are blocked, and the block sizes.

Input: a kernel; output: for each axis its range inside one program, and whether values along it are tiles.  GRID axes
that only one side of a product spans are blocked, one per side: their points share the loads of the other side.  So are
axes of an outer loop over which folds inside an inner one run.  Other GRID axes (a batch) are one point per program.
Of the axes of a loop the longest is blocked, the others run point by point.  WHOLE axes are in every tile in full.

Products whose left factor is read where it lies, and whose sums are all that their loops compute, are *streamed*: one
panel of the right factor is packed for long sums and many rows, since packing it again costs more than anything else
beside the multiply-adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import sympy

from fusion.codegen.c.text.indices import Names, index_text
from fusion.codegen.c.text.nest import Extent, block_extent, whole_extent
from fusion.codegen.c.text.products import COLUMN_BLOCK, FACTORS, PART, ROW_BLOCK
from fusion.lowering.indexing import ONE, FloorDiv, coefficient
from fusion.lowering.ir.expr import Expr, Load
from fusion.lowering.ir.kernel import Fold, Kernel, KernelAxis, Loop, Role, outer_axes, running, statements

MOST_BLOCK_ROWS = 192
"""Most rows of a program: packing the other operand of a product costs little when this many rows share it."""

FEWEST_ROWS = 24
"""Least rows of a block that is divided to give threads work."""

MOST_BLOCK_COLUMNS = 192
"""Most points of a second blocked GRID axis, or of one block of a loop; with `MOST_BLOCK_ROWS` float32 rows, 1/7 of
1 MiB."""

STREAMED_ROWS, STREAMED_COLUMNS, STREAMED_TERMS = 258, 64, 1024
"""Most rows and columns of a program of streamed products, and terms that are packed at a time: a packed panel takes
256 KiB, a tile 80 (measured: docs/performance.md, `STREAMED_ROWS`)."""

LEAST_STREAMED = 2 * COLUMN_BLOCK
"""Least rows and columns of streamed products: fewer rows do not share a panel that is worth packing."""

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
        streamed: whether the products of the kernel are streamed.
    """

    of: Mapping[sympy.Symbol, Block]
    before: tuple[str, ...]
    rows: sympy.Symbol | None = None
    step: str = ""
    multiple: int = COLUMN_BLOCK
    streamed: bool = False

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
    streamed = is_streamed(kernel)
    most = STREAMED_ROWS if streamed else most
    blocks: dict[sympy.Symbol, Block] = {}
    for axis in kernel.axes:
        symbol = axis.symbol
        if axis.role is Role.WHOLE:
            blocks[symbol] = _end_to_end(axis, axis.size, names)
        elif symbol in spread[:1]:
            width = _even(axis.size, most, PART if skipping else ROW_BLOCK)
            choose = _streamed_rows if streamed else partial(_row_width, skipping=skipping)
            step = choose(kernel, axis, width, names, before)
            blocks[symbol] = _cut(axis, width, step, names)
        elif symbol in spread or symbol in blocked_loops:
            most_columns = STREAMED_COLUMNS if streamed and symbol in spread else MOST_BLOCK_COLUMNS
            width = _even(axis.size, most_columns, multiple)
            if streamed and symbol in blocked_loops:
                width *= max(1, STREAMED_TERMS // width)
            blocks[symbol] = _cut(axis, width, str(width), names)
        else:
            blocks[symbol] = _end_to_end(axis, None, names)
    return Blocks(blocks, tuple(before), next(iter(spread), None), step, multiple, streamed)


def is_streamed(kernel: Kernel) -> bool:
    """Return whether a kernel computes nothing but products in its loops, whose left factors lie in memory.

    Its rows and columns are spread over programs, and more rows than one register block share the packing.
    """
    loops = [stmt for stmt in kernel.body if isinstance(stmt, Loop)]
    spread = {axis.symbol: length(axis.size) for axis in kernel.with_role(Role.GRID)}
    alone = not any(isinstance(stmt, Fold) for stmt in kernel.body)
    return bool(loops) and alone and all(_streams(loop, spread) for loop in loops)


def _streams(loop: Loop, spread: Mapping[sympy.Symbol, int]) -> bool:
    """Return whether a loop computes only products of factors in memory with many rows and columns in the grid."""
    if loop.where is not None or len(loop.axes) > 1 or running(loop):
        return False
    for stmt in loop.body:
        if not isinstance(stmt, Fold) or stmt.op != "dot" or stmt.carry is not None or set(stmt.over) != {*loop.axes}:
            return False
        sides = [[spread.get(symbol, 0) for symbol in side] for side in (stmt.rows, stmt.columns)]
        if not _lies_in_memory(stmt.args[0], {*stmt.rows, *stmt.over}):
            return False
        if any(max(side, default=0) < LEAST_STREAMED for side in sides):
            return False
    return True


def _lies_in_memory(factor: Expr, symbols: Iterable[sympy.Symbol]) -> bool:
    """Return whether a factor is read where it lies: with one distance between its elements along each axis."""
    if not isinstance(factor, Load) or factor.mask is not None or isinstance(factor.index[0], Expr):
        return False
    if factor.dtype not in FACTORS:  # others are converted
        return False
    offset = factor.index[0]
    return all(coefficient(offset, symbol) is not None for symbol in symbols)


def programs(kernel: Kernel) -> int:
    """Return how many programs share the work of a kernel, if its threads are many."""
    spread = _spread(kernel)
    widest = STREAMED_COLUMNS if is_streamed(kernel) else MOST_BLOCK_COLUMNS
    widths = {**dict.fromkeys(spread, widest), **dict.fromkeys(spread[:1], FEWEST_ROWS)}
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


def _streamed_rows(kernel: Kernel, axis: KernelAxis, width: int, names: Names, before: list[str]) -> str:
    """Return C text of the width of row blocks: of equal parts, as many as give each thread two programs."""
    others = [other for other in kernel.with_role(Role.GRID) if other != axis]
    columns = {symbol for symbol in _spread(kernel) if symbol != axis.symbol}
    parts = [FloorDiv(each.size + STREAMED_COLUMNS - 1, STREAMED_COLUMNS) for each in others if each.symbol in columns]
    programs = sympy.Mul(ONE, *parts, *(each.size for each in others if each.symbol not in columns))
    if programs.is_Integer and programs >= MANY_PROGRAMS:
        return str(width)
    name, size = f"{names[axis.symbol]}_step", index_text(axis.size, names)
    count = f"(2*threads + {index_text(programs, names)} - 1)/imax(1, {index_text(programs, names)})"
    share = f"({size} + {name}_parts - 1)/{name}_parts"
    before.append(f"const int64_t {name}_parts = imax(1, {count});")
    before.append(
        f"const int64_t {name} = imax({FEWEST_ROWS}, imin({width}, "
        f"({share} + {ROW_BLOCK - 1})/{ROW_BLOCK}*{ROW_BLOCK}));"
    )
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
