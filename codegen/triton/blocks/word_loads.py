"""Word loads: loads of 16 bytes at a time up to the very end of a row that ends within a word.

    ri < 50257      becomes      ri < 50264      for 8 elements in a word

A mask that may end anywhere makes each thread load one element at a time, which takes more instructions and registers
than the rest of a kernel.  Input: a load; output: the dimension along which it reads a row from an aligned address, and
the elements of a word.  A word that contains an element of the row can be read as a whole: no allocation begins or ends
within one.  The elements beyond the row are not used, since folds and stores have masks of their own.  (sm_90,
bfloat16, loss and gradient of rows of 50257: 254 registers with masks per element, 87 with these; of rows that are
50304 apart, with their own end, 96 and 80.)
"""

from __future__ import annotations

import sympy

from fusion.codegen.triton.blocks.dims import WORD, Blocked, Dim
from fusion.lowering.expr import Expr, Load
from fusion.lowering.indexing import coefficient
from fusion.lowering.kernel import Role


def word_load(blocked: Blocked, load: Load) -> tuple[Dim, int] | None:
    """Return the dimension that `load` reads in words, and the elements of a word; None for any other load."""
    offset, param = load.index[0], blocked.kernel.param(load.buffer)
    word = WORD // load.dtype.itemsize
    if blocked.contraction or isinstance(offset, Expr) or load.mask is not None or not param.aligned or word < 2:
        return None
    if not blocked.dims:
        return None  # a single number
    dim = blocked.dims[-1]
    if dim.role is not Role.LOOP or not dim.size.is_Integer or coefficient(offset, dim.symbol) != 1:
        return None
    if dim.shift == 0 and int(dim.size) % word == 0:
        return None  # its mask ends with a word
    start = sympy.expand(offset - dim.symbol)
    aligned = all(int(term.as_coeff_Mul()[0]) % word == 0 for term in sympy.Add.make_args(start))
    return (dim, word) if aligned else None
