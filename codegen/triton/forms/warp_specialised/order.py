"""Orders the blocks of a loop whose first block is peeled off.

Input: a loop; output: its first block, and the others part by part (`loops/skips.py`).  In a part some blocks need no
condition.  The first block is computed under the full condition in any case, so a loop some of whose blocks need it
starts with these.  Where they are the last ones it runs downwards: with a causal mask there is one such block, and no
part for it.  Where they are on both sides of a run without condition, as under a mask in memory, the run comes last;
in one loop with them if the condition decides one selection, which is evaluated where it has to be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusion.codegen.interior import only_selection
from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.expressions.code import PRODUCT, SUM, Code, as_code, compose
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.loops import skips
from fusion.lowering.ir.kernel import Loop


@dataclass(frozen=True, slots=True)
class Iterations:
    """Blocks of one part of a loop.

    Attributes:
        part: the part.
        header: the range of the loop header.
        start: the start of the block of a loop variable.
        conditional: the loop variable up to which blocks need the condition, if only some of the part do.
    """

    part: skips.LoopPart
    header: Code
    start: Callable[[Code], Code]
    conditional: Code | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """The blocks of a loop.

    Attributes:
        first: the start of the first one.
        header: the range of the loop header over all of them, of which there is at least one.
        start: the start of the block of a value of the variable of that loop.
        others: the following blocks, part by part.
        variable: the name of the loop variables; `n0` if they are the starts of blocks.
    """

    first: Code
    header: Code
    start: Callable[[Code], Code]
    others: tuple[Iterations, ...]
    variable: str


def order_of(values: Values, loop: Loop, dim: Dim) -> Order:
    """Return the order of the blocks of `loop` along `dim`; add the lines that it depends on."""
    parts = skips.parts(values, loop, dim, split=True)
    if parts[-1].gap is not None:
        return _run_last(values, loop, parts[0], parts[-1], dim)
    if len(parts) < 2 or not parts[0].full:
        return _upwards(parts, loop, dim)
    unconditional, conditional = parts
    return _downwards(values, loop, unconditional, conditional, dim)


def _upwards(parts: Sequence[skips.LoopPart], loop: Loop, dim: Dim) -> Order:
    """Return the order from the first block to the last."""
    start, end, block = parts[0].start, parts[-1].end, as_code(dim.constant)
    after = block if start == Code("0") else compose("{} + {}", start, block)
    begins = [after, *(compose("tl.maximum({}, {})", part.start, after) for part in parts[1:])]
    others = tuple(
        Iterations(part, compose("range({}, {}, {})", begin, part.end, block), _same)
        for begin, part in zip(begins, parts, strict=True)
    )
    least = end if loop.where is None else compose("tl.maximum({}, {} + 1)", end, start)
    return Order(start, compose("range({}, {}, {})", start, least, block), _same, others, "n0")


def _downwards(
    values: Values, loop: Loop, unconditional: skips.LoopPart, conditional: skips.LoopPart, dim: Dim
) -> Order:
    """Return the order from the last block, which needs the condition, to the first."""
    start, end, block = unconditional.start, conditional.end, as_code(dim.constant)
    last = compose("tl.maximum({0} - 1, {1}) // {2} * {2}", end, start, block, binds=SUM)
    first = values.name(f"{dim.name}_last", Tile(last, depth=values.depth)).code
    below = compose("{} + 1", first) if start == Code("0") else compose("{} + 1 - {}", first, start)

    def of(distance: Code) -> Code:
        return compose("{} - {}", first, distance)

    begin, others = block, list[Iterations]()
    if not skips.is_one_block(values, loop, dim):
        begin = compose("tl.maximum({} - {}, 0) + {}", first, unconditional.end, block)
        header = compose("range({}, {} + 1 - {}, {})", block, first, conditional.start, block)
        others = [Iterations(conditional, header, of)]
    others.append(Iterations(unconditional, compose("range({}, {}, {})", begin, below, block), of))
    return Order(first, compose("range(0, {}, {})", below, block), of, tuple(others), "below")


def _run_last(values: Values, loop: Loop, run: skips.LoopPart, rest: skips.LoopPart, dim: Dim) -> Order:
    """Return the order in which a run of blocks without condition follows the blocks on both of its sides.

    If no block counts, one is nevertheless computed, under its condition.
    """
    assert rest.gap is not None
    block = as_code(dim.constant)

    def named(wish: str, code: Code) -> Code:
        return values.name(f"{dim.name}_{wish}", Tile(code, depth=values.depth)).code

    count = named("rest", compose("tl.maximum(tl.cdiv({} - {}, {}), 0) * {}", rest.end, rest.start, block, block))
    total = named("total", compose("{} + {} - {}", count, run.end, run.start))
    gap, length = rest.gap
    last = compose("({} - 1) // {} * {}", values.index_tile(dim.size).code, block, block, binds=PRODUCT)

    def beside(at: Code) -> Code:
        return compose("{0} + {1} + tl.where({0} + {1} < {2}, 0, {3})", rest.start, at, gap, length, binds=SUM)

    def within(at: Code) -> Code:
        return compose("{} + {} - {}", run.start, at, count, binds=SUM)

    def of(at: Code) -> Code:
        return compose("tl.where({} < {}, {}, tl.minimum({}, {}))", at, count, beside(at), within(at), last)

    start = compose("{0} + tl.where({0} < {1}, 0, {2})", rest.start, gap, length)
    first = named("begin", compose("tl.where({} > 0, {}, tl.minimum({}, {}))", count, start, run.start, last))
    header = compose("range(0, tl.maximum({}, 1), {})", total, block)
    if only_selection(loop) is not None:
        both = compose("range({}, {}, {})", block, total, block)
        return Order(first, header, of, (Iterations(rest, both, of, conditional=count),), "at")
    others = (
        Iterations(rest, compose("range({}, {}, {})", block, count, block), beside),
        Iterations(run, compose("range(tl.maximum({}, {}), {}, {})", count, block, total, block), within),
    )
    return Order(first, header, of, others, "at")


def _same(start: Code) -> Code:
    return start
