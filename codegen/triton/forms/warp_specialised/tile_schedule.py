"""Assigns blocks of rows to the warp-specialised programs, each of which computes its blocks in sequence.

Input: block dimensions; output: the lines that compute the block of a round.  In each round every program has one,
forwards and backwards in alternation, so that where loops are longer for some rows than for others each program gets
long and short ones.  Heads whose operands fit the cache together are a section: its blocks are all done before the
next one starts, and its rounds are counted separately.  Otherwise a section would start in the middle of a round, in
which some programs got its longest loops and others the shortest of the section before: with four sections of 512
blocks, the last program ended a quarter of the time after the average one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fusion.codegen.triton.blocks import Blocked, Config, Dim, extent
from fusion.codegen.triton.expressions.code import PRODUCT, SUM, Code, compose, listed
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.forms.warp_groups.functions import Mark
from fusion.codegen.triton.products.block_order import assign_block


@dataclass(frozen=True, slots=True)
class TileLoop:
    """The open loop over the blocks of a program.

    Attributes:
        begin: the place in its body from which on the number of the block is known.
        close: closes the loop.
    """

    begin: Mark
    close: Callable[[], None]


def depth(blocked: Blocked, config: Config) -> int:
    """Return the number of loops in which a program computes its blocks."""
    return 1 + (_sections(blocked, config) is not None)


def _sections(blocked: Blocked, config: Config) -> Dim | None:
    """Return the dimension of heads, if they are more than one section."""
    batch = next((dim for dim in blocked.grid() if dim.name == "b"), None)
    return batch if batch is not None and 1 < config.group < extent(batch.size) else None


def open_tile_loop(values: Values, m: Dim) -> TileLoop:
    """Open the loop over the blocks of a program and define the start of each."""
    layout = values.layout
    rows = compose("tl.cdiv({}, {})", values.index_tile(m.size).code, m.constant)
    counts = [values.index_tile(dim.size).code.at(PRODUCT) for dim in layout.blocked.grid() if dim.name == "b"]
    blocks = values.name("blocks", Tile(listed([*counts, rows], " * "))).code
    batch = _sections(layout.blocked, layout.config)
    if batch is None:
        return _open(values, blocks, Code("0"))
    together = values.name("together", Tile(compose("{} * {}", layout.config.group, rows))).code
    section = values.open("section")
    first = values.name("first", Tile(compose("{} * {}", section, together), depth=values.depth)).code
    count = compose("tl.minimum({}, {} - {})", together, blocks, first)
    tiles = _open(values, values.name("count", Tile(count, depth=values.depth)).code, section, first)

    def close_both() -> None:
        tiles.close()
        values.close("for {} in range(tl.cdiv({}, {})):", section, blocks, together)

    return replace(tiles, close=close_both)


def _open(values: Values, blocks: Code, section: Code, first: Code | None = None) -> TileLoop:
    """Open the loop over one section, which starts at the block `first`."""
    turn = values.open("turn")
    code = compose("{}({}, {})", "_zigzag", turn, section)
    if first is not None:
        code = compose("{} + {}", first, code, binds=SUM)
    number = values.name("number", Tile(code, depth=values.depth)).code
    begin = Mark.here(values)
    assign_block(values, number)
    return TileLoop(begin, lambda: values.close("for {} in range({}({}, {})):", turn, "_zigzag_turns", blocks, section))
