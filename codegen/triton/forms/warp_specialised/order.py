"""Order: the order of the blocks of a loop whose first block is peeled off.

Input: a loop; output: its first block, and the others part by part (`loops/skips.py`).  In a part some blocks need no
condition.  The first block is computed under the full condition in any case, so a loop whose last blocks need it starts
with these and runs downwards: with a causal mask there is one such block, and no part for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.expressions.code import SUM, Code, as_code, compose
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.loops import skips
from fusion.lowering.kernel import Loop


@dataclass(frozen=True, slots=True)
class Order:
    """The blocks of a loop.

    Attributes:
        first: the start of the first one.
        every: the range of the loop header over all of them, of which there is at least one.
        others: the parts of the following blocks, each with its range.
        down: is the loop variable the distance of a block below the first, rather than its start?
    """

    first: Code
    every: Code
    others: tuple[tuple[skips.Part, Code], ...]
    down: bool

    def start(self, variable: Code) -> Code:
        """Return the start of the block of a value of the loop variable."""
        return compose("{} - {}", self.first, variable) if self.down else variable


def order_of(values: Values, loop: Loop, dim: Dim) -> Order:
    """Return the order of the blocks of `loop` along `dim`; add the lines that it depends on."""
    parts, block = skips.parts(values, loop, dim, split=True), as_code(dim.constant)
    assert all(part.gap is None for part in parts)
    start, end = parts[0].start, parts[-1].end
    if len(parts) < 2 or not parts[0].full:
        after = block if start == Code("0") else compose("{} + {}", start, block)
        begins = [after, *(compose("tl.maximum({}, {})", part.start, after) for part in parts[1:])]
        others = [
            (part, compose("range({}, {}, {})", begin, part.end, block))
            for begin, part in zip(begins, parts, strict=True)
        ]
        least = end if loop.where is None else compose("tl.maximum({}, {} + 1)", end, start)
        return Order(start, compose("range({}, {}, {})", start, least, block), tuple(others), down=False)
    unconditional, conditional = parts
    last = compose("tl.maximum({0} - 1, {1}) // {2} * {2}", end, start, block, binds=SUM)
    first = values.name(f"{dim.name}_last", Tile(last, depth=values.depth)).code
    below = compose("{} + 1", first) if start == Code("0") else compose("{} + 1 - {}", first, start)
    begin, others = block, list[tuple[skips.Part, Code]]()
    if not skips.is_one_block(values, loop, dim):
        begin = compose("tl.maximum({} - {}, 0) + {}", first, unconditional.end, block)
        others = [(conditional, compose("range({}, {} + 1 - {}, {})", block, first, conditional.start, block))]
    others.append((unconditional, compose("range({}, {}, {})", begin, below, block)))
    return Order(first, compose("range(0, {}, {})", below, block), tuple(others), down=True)
