"""Selects, among products of the same rows, the one that a block of columns belongs to.

Input: for each product what differs between them (descriptors, pointers), as code, and its number of blocks of columns;
output: names that stand for what the product of the current block has:

    columns = in1_desc
    first_block = 0
    if n_block >= 8:
        columns = in2_desc
        first_block = 8
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.codegen.triton.expressions.code import Code, compose
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.products.block_order import blocks_of


def column_ends(values: Values, layouts: Sequence[Layout]) -> list[Code]:
    """Add the lines that count the blocks of columns of each product; return where those of each end."""
    ends: list[Code] = []
    for layout in layouts:
        count = blocks_of(values, layout.blocked.named("n"))
        ends.append(values.name("n_end", Tile(compose("{} + {}", ends[-1], count))).code if ends else count)
    return ends


def select(
    values: Values, wishes: Sequence[str], choices: Sequence[Sequence[Code]], n_block: Code, ends: Sequence[Code]
) -> tuple[str, ...]:
    """Add the lines that select the product of a block of columns; return its choices and first block by name."""
    names = tuple(values.fresh(wish, values.depth) for wish in (*wishes, "first_block"))
    values.line("# The product that this block of columns belongs to.")
    for own, start in zip(choices, (Code("0"), *ends[:-1]), strict=True):
        first = own is choices[0]
        if not first:
            values.line("if {} >= {}:", n_block, start)
        for name, chosen in zip(names, (*own, start), strict=True):
            values.line("{} = {}" if first else "    {} = {}", name, chosen)
    return names
