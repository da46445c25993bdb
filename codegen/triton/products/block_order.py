"""Assigns blocks of the result to the programs of a contraction.

Input: the number of a program; output: lines that compute its block.  Programs are numbered so that neighbours
share operands in the L2 cache, and that the longest loops come first where a mask makes them unequal.
"""

from __future__ import annotations

from fusion.codegen.triton.blocks import Dim, extent
from fusion.codegen.triton.expressions.code import ATOM, PRODUCT, Code, as_code, compose, listed, widened
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.loops.skips import longer_for_later_rows


def assign_block(values: Values, number: Code) -> None:
    """Add the lines that compute the block of program `number`, and set the starts of the GRID dimensions."""
    layout = values.layout
    grid = {dim.name: dim for dim in layout.blocked.grid()}
    counts = {name: blocks_of(values, grid[name]) for name in ("m", "n") if name in grid}
    if "b" in grid and len(counts) == 1 and layout.config.group > 1 and layout.blocked.chained:
        number = _alternate(values, grid["b"], next(iter(counts.values())), number)
    elif "b" in grid:
        both = listed(counts.values() or [1], " * ", PRODUCT if len(counts) == 2 else ATOM).at(ATOM)
        _start_batch(values, grid["b"], compose("{} // {}", number, both, binds=PRODUCT))
        number = values.name("block", Tile(compose("{} % {}", number, both, binds=PRODUCT), depth=values.depth)).code
    values.block = number
    if len(counts) == 2:
        blocks = dict(zip(("m", "n"), swizzled(values, number, counts["m"], counts["n"]), strict=True))
    else:
        blocks = dict.fromkeys(counts, number)
    if set(blocks) == {"m"} and longer_for_later_rows(layout.blocked):
        values.line("# The blocks of rows that take longest come first.")
        block = compose("{} - 1 - {}", counts["m"], number.at(PRODUCT))
        blocks = {"m": values.name("m_block", Tile(block, depth=values.depth)).code}
    for name, block in blocks.items():
        start_block(values, grid[name], block)


def blocks_of(values: Values, dim: Dim) -> Code:
    """Add the line that counts the blocks of a GRID dimension; return their number."""
    size = values.index_tile(dim.size).code
    code = compose("tl.cdiv({}, {})", size, dim.constant)
    code = as_int32(code, known=dim.size.is_Integer or not values.layout.grid_depth)
    return values.name(f"{dim.name}_blocks", Tile(code, depth=values.depth)).code


def swizzled(values: Values, number: Code, m: Code, n: Code) -> tuple[Code, Code]:
    """Add the lines that compute the block of rows (of `m`) and of columns (of `n`) of a block number; return both."""
    values.line("# Down a few blocks of rows before the next block of columns: these share operands in the cache.")
    m_block, n_block = (as_code(values.fresh(f"{name}_block", values.depth)) for name in ("m", "n"))
    where = compose("{0} // {1}, {0} % {1}, {2}, {1}", number, n, m)
    values.line("{}, {} = tl.swizzle2d({}, {})", m_block, n_block, where, values.layout.config.group)
    return m_block, n_block


def start_block(values: Values, dim: Dim, block: Code) -> None:
    """Add the line that computes the start of a block of a GRID dimension."""
    text = compose("{} * {}", block.at(PRODUCT), dim.constant, binds=PRODUCT)
    values.starts[dim] = values.name(f"{dim.name}0", Tile(text, depth=values.depth)).code


def as_int32(count: Code, *, known: bool) -> Code:
    """Return a count of blocks as int32, which holds it where a descriptor counts the rows; known sizes are int32
    already.
    """
    return count if known else compose("tl.cast({}, tl.int32)", count)


def _alternate(values: Values, batch: Dim, blocks: Code, number: Code) -> Code:
    """Add the lines by which a few points of `batch` alternate their blocks; return the block."""
    group = values.layout.config.group
    values.line("# The first blocks of all that fit the cache together, then their second blocks, and so on.")
    size = values.index_tile(batch.size).code
    if extent(batch.size) <= group:
        _start_batch(values, batch, compose("{} % {}", number, size.at(ATOM), binds=PRODUCT))
        return values.name(
            "block", Tile(compose("{} // {}", number, size.at(ATOM), binds=PRODUCT), depth=values.depth)
        ).code
    point, block = (as_code(values.fresh(name, values.depth)) for name in ("batch", "block"))
    where = compose("{0} // {1}, {0} % {1}", number, blocks)
    values.line("{}, {} = tl.swizzle2d({}, {}, {}, {})", point, block, where, size, blocks, group)
    _start_batch(values, batch, point)
    return block


def _start_batch(values: Values, batch: Dim, point: Code) -> None:
    wide = batch in values.layout.wide
    values.starts[batch] = widened(point) if wide else point
