"""Turns: the blocks of rows that each warp-specialised program computes, in sequence.

Input: block dimensions; output: the lines that compute the block of a turn.  Programs take turns, forwards and
backwards in alternation, so that where loops are longer for some rows than for others each program gets long and short
ones.  Heads whose operands fit the cache together are a section: its blocks are all done before the next one starts,
and its turns are counted separately.  Otherwise a section would start in the middle of a turn, in which some programs
got its longest loops and others the shortest of the section before: with four sections of 512 blocks, the last program
ended a quarter of the time after the average one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fusion.codegen.triton.blocks import Blocked, Config, Dim, extent
from fusion.codegen.triton.expressions.scalar_code import ATOM, PRODUCT, SUM, Code
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.products.block_order import assign_block


@dataclass(frozen=True, slots=True)
class Turns:
    """The open loop over the blocks of a program.

    Attributes:
        begin: the line of its body from which on the number of the block is known.
        close: closes the loop.
    """

    begin: int
    close: Callable[[], None]


def depth(blocked: Blocked, config: Config) -> int:
    """Return the number of loops in which a program computes its blocks."""
    return 1 + (_sections(blocked, config) is not None)


def _sections(blocked: Blocked, config: Config) -> Dim | None:
    """Return the dimension of heads, if they are more than one section."""
    batch = next((dim for dim in blocked.grid() if dim.name == "b"), None)
    return batch if batch is not None and 1 < config.group < extent(batch.size) else None


def open_turns(values: Values, m: Dim) -> Turns:
    """Open the loop over the blocks of a program and define the start of each."""
    layout = values.layout
    rows = f"tl.cdiv({values.index_tile(m.size).code.text}, {m.constant})"
    counts = [values.index_tile(dim.size).code.at(PRODUCT) for dim in layout.blocked.grid() if dim.name == "b"]
    blocks = values.name("blocks", Tile(Code(" * ".join([*counts, rows])))).code.text
    batch = _sections(layout.blocked, layout.config)
    if batch is None:
        return _open(values, blocks, "0", "")
    together = values.name("together", Tile(Code(f"{layout.config.group} * {rows}"))).code.text
    section = values.open("section")
    first = values.name("first", Tile(Code(f"{section} * {together}"), depth=values.depth)).code.text
    count = Code(f"tl.minimum({together}, {blocks} - {first})")
    turns = _open(values, values.name("count", Tile(count, depth=values.depth)).code.text, section, f"{first} + ")

    def close_both() -> None:
        turns.close()
        values.close(f"for {section} in range(tl.cdiv({blocks}, {together})):")

    return replace(turns, close=close_both)


def _open(values: Values, blocks: str, section: str, before: str) -> Turns:
    """Open the turns of one section, which starts after the blocks `before`."""
    turn = values.open("turn")
    code = Code(f"{before}_zigzag({turn}, {section})", SUM if before else ATOM)
    number = values.name("number", Tile(code, depth=values.depth)).code.text
    begin = len(values.scopes[-1].lines)
    assign_block(values, number)
    return Turns(begin, lambda: values.close(f"for {turn} in range(_zigzag_turns({blocks}, {section})):"))
