"""Order: in which order a walk whose first block stands for itself takes its blocks.

What enters is a loop; what leaves is its first block, and the others part by part (`loops/skips.py`).  In a part some
blocks need no condition.  The first block is computed under all of it in any case, so a walk whose last blocks need it
begins with these and goes downwards: rows that see what comes before them have one such block, and no part for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.expressions.scalar_code import SUM, Code
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.loops import skips
from fusion.lowering.kernel import Loop


@dataclass(frozen=True, slots=True)
class Order:
    """The blocks of a walk.

    Attributes:
        first: where the first one begins, as text.
        every: the header's turns over all of them, of which there is at least one.
        others: the parts of those that follow, each with its turns.
        down: does a turn say how far a block lies below the first, rather than where it begins?
    """

    first: str
    every: str
    others: tuple[tuple[skips.Part, str], ...]
    down: bool

    def start(self, turn: str) -> str:
        """Where the block of a turn begins."""
        return f"{self.first} - {turn}" if self.down else turn


def order_of(values: Values, loop: Loop, dim: Dim) -> Order:
    """The order in which the blocks of `loop` along `dim` are taken; adds the lines of what it needs to know."""
    parts, block = skips.parts(values, loop, dim, split=True), dim.constant
    assert all(part.gap is None for part in parts)
    start, end = parts[0].start, parts[-1].end
    if len(parts) < 2 or not parts[0].full:
        after = block if start == "0" else f"{start} + {block}"
        begins = [after, *(f"tl.maximum({part.start}, {after})" for part in parts[1:])]
        others = [(part, f"range({begin}, {part.end}, {block})") for begin, part in zip(begins, parts, strict=True)]
        least = end if loop.where is None else f"tl.maximum({end}, {start} + 1)"
        return Order(start, f"range({start}, {least}, {block})", tuple(others), down=False)
    plain, asked = parts
    text = Code(f"tl.maximum({end} - 1, {start}) // {block} * {block}", SUM)
    first = values.name(f"{dim.name}_last", Tile(text, depth=values.depth)).code.text
    below = f"{first} + 1" if start == "0" else f"{first} + 1 - {start}"
    begin, others = block, []
    if not skips.is_one_block(values, loop, dim):
        begin = f"tl.maximum({first} - {plain.end}, 0) + {block}"
        others = [(asked, f"range({block}, {first} + 1 - {asked.start}, {block})")]
    others.append((plain, f"range({begin}, {below}, {block})"))
    return Order(first, f"range(0, {below}, {block})", tuple(others), down=True)
