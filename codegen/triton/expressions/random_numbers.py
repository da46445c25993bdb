"""Draws random numbers in Triton: neighbours share an evaluation of the generator where a thread can hold them.

Input: a random number per element, keyed by a seed, at a counter; output: the call of a function of the prelude.  The
generator gives four words at once, and costs a hundred instructions.  Where counters follow each other along the last
dimension of a tile, and rows begin at multiples of four, it is evaluated for every fourth element (numbers of two
words: every second), and its words are joined in registers; elsewhere each element takes one word of four.
"""

from __future__ import annotations

import sympy

from fusion.codegen.triton.blocks import Dim, LaneDim
from fusion.codegen.triton.expressions.code import compose
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.kernel import Loop, Role, statements
from fusion.lowering.ir.scalar_ops import Distribution
from fusion.lowering.random.philox import NEIGHBOURS

_FUNCTIONS = {
    ("uniform", True): "_uniform_by_four",
    ("uniform", False): "_uniform",
    ("normal", True): "_normal_by_two",
    ("normal", False): "_normal",
}
"""Distribution, whether neighbours share evaluations → function of the prelude."""


def drawn(layout: Layout, kind: Distribution, seed: Tile, counter: sympy.Expr, at: Tile) -> Tile:
    """Return numbers under a seed at `counter`, whose int64 values are the tile `at`."""
    function = _FUNCTIONS[kind, are_neighbours(layout, counter, NEIGHBOURS[kind])]
    return Tile(compose("{}({}, {})", function, seed.code, at.code), at.dims, max(seed.depth, at.depth))


def are_neighbours(layout: Layout, counter: sympy.Expr, count: int) -> bool:
    """Return whether a counter counts along the last dimension of its tile, in groups of `count` that are never cut.

    Tiles beside products are in the layout of these, in which a thread holds two neighbours at most.
    """
    dims = layout.spanned(counter)
    if not dims or layout.blocked.contraction or not _is_whole(layout, dims[-1], count):
        return False
    rest = sympy.expand(counter - dims[-1].symbol)
    if coefficient(counter, dims[-1].symbol) != 1 or dims[-1].symbol in rest.free_symbols:
        return False
    return all(term.as_coeff_Mul()[0] % count == 0 for term in sympy.Add.make_args(rest))


def _is_whole(layout: Layout, dim: Dim, count: int) -> bool:
    """Return whether the blocks of a dimension begin at multiples of `count`, and are multiples of it."""
    block = layout.config.block(dim.name) // (layout.parts if dim in layout.parted else 1)
    if isinstance(dim, LaneDim) or dim.shift != 0 or block % count:
        return False
    if dim.role is not Role.LOOP:
        return True
    narrowed = any(loop.where is not None for loop in statements(layout.blocked.body, Loop))
    return not narrowed and bool(dim.size.is_Integer) and dim.size % count == 0  # it may run backwards from its end
