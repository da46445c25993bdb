"""Splits the epilogue of a GEMM block into parts of its columns, computed one at a time.

Input: a block whose sums are complete; output: a loop over parts of its columns, in which tiles are loaded, results
computed and stored.  A part takes half the registers, and half the shared memory for its store: the freed memory holds
another stage of the operands, or another program.

    dot0_parts = _halves(dot0)
    for part in tl.static_range(2):
        n1 = n0 + part * (NBLOCK // 2)
        …
        out0_desc.store([m0, n1], (dot0_parts[part] + in2[None, :]).to(tl.bfloat16))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fusion.codegen.triton.expressions.code import SUM, compose
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values


@contextmanager
def in_parts(values: Values) -> Iterator[None]:
    """Add the lines within for one part of the columns; if the configuration has no parts, for the full block."""
    layout = values.layout
    if layout.parts == 1:
        yield
        return
    assert layout.parts == 2
    n = layout.blocked.named("n")
    sums = {dot.ref: values.find(dot.ref) for dot in layout.blocked.dots}
    halves = {}
    for ref, tile in sums.items():
        assert tile is not None
        assert values.find(("index", n)) is None
        halves[ref] = values.name(
            f"{tile.code.text}_parts", Tile(compose("{}({})", "_halves", tile.code), tile.dims, tile.depth)
        )
    start = values.starts[n]
    part = values.open("part")
    values.layout = layout.with_parts(n)
    code = compose("{} + {} * ({})", start, part, values.layout.width(n), binds=SUM)
    values.starts[n] = values.name("n1", Tile(code, depth=values.depth)).code
    for ref, tile in halves.items():
        values.bind(ref, Tile(compose("{}[{}]", tile.code, part), tile.dims, values.depth))
    yield
    values.layout, values.starts[n] = layout, start
    values.close("for {} in tl.static_range({}):", part, layout.parts)
