"""Order: the order of the blocks of a loop whose first block is peeled off.

Input: a loop; output: its first block, and the others part by part (`loops/skips.py`).  In a part some blocks need no
condition.  The first block is computed under the full condition in any case, so a loop whose last blocks need it starts
with these and runs downwards: with a causal mask there is one such block, and no part for it.
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
    """The blocks of a loop.

    Attributes:
        first: the start of the first one, as text.
        every: the range of the loop header over all of them, of which there is at least one.
        others: the parts of the following blocks, each with its range.
        down: is the loop variable the distance of a block below the first, rather than its start?
    """

    first: str
    every: str
    others: tuple[tuple[skips.Part, str], ...]
    down: bool

    def start(self, variable: str) -> str:
        """Return the start of the block of a value of the loop variable."""
        return f"{self.first} - {variable}" if self.down else variable


def order_of(values: Values, loop: Loop, dim: Dim) -> Order:
    """Return the order of the blocks of `loop` along `dim`; add the lines that it depends on."""
    parts, block = skips.parts(values, loop, dim, split=True), dim.constant
    assert all(part.gap is None for part in parts)
    start, end = parts[0].start, parts[-1].end
    if len(parts) < 2 or not parts[0].full:
        after = block if start == "0" else f"{start} + {block}"
        begins = [after, *(f"tl.maximum({part.start}, {after})" for part in parts[1:])]
        others = [(part, f"range({begin}, {part.end}, {block})") for begin, part in zip(begins, parts, strict=True)]
        least = end if loop.where is None else f"tl.maximum({end}, {start} + 1)"
        return Order(start, f"range({start}, {least}, {block})", tuple(others), down=False)
    unconditional, conditional = parts
    text = Code(f"tl.maximum({end} - 1, {start}) // {block} * {block}", SUM)
    first = values.name(f"{dim.name}_last", Tile(text, depth=values.depth)).code.text
    below = f"{first} + 1" if start == "0" else f"{first} + 1 - {start}"
    begin, others = block, []
    if not skips.is_one_block(values, loop, dim):
        begin = f"tl.maximum({first} - {unconditional.end}, 0) + {block}"
        others = [(conditional, f"range({block}, {first} + 1 - {conditional.start}, {block})")]
    others.append((unconditional, f"range({begin}, {below}, {block})"))
    return Order(first, f"range(0, {below}, {block})", tuple(others), down=True)
