"""Reads loop bounds from memory where the rows of a program share few integers.

Input: a load at an index that depends on rows only through their group, or on no row at all; output: its least or
greatest value over the rows of the program, as a scalar.  One scalar load reads the number of a group.

    first[m // 64], for 128 rows from m0 on    →    min(load(first + m0 // 64), load(first + (m0 + 64) // 64))
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import sympy
import torch

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.expressions.code import Code, compose
from fusion.codegen.triton.expressions.indices import Layout, start_symbol
from fusion.codegen.triton.expressions.scalar_code import literal
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.lowering.indexing import FloorDiv
from fusion.lowering.ir.expr import Expr, Load
from fusion.lowering.ir.kernel import Role

_MOST_GROUPS = 4
"""Groups of the rows of a program whose numbers are read."""

_DTYPES = (torch.int32, torch.int64)


def is_shared(layout: Layout, load: Expr, looped: Dim) -> bool:
    """Return whether a value is a loaded integer that is constant along the loop, and has few values in a program."""
    if not isinstance(load, Load) or load.mask is not None or load.dtype not in _DTYPES:
        return False
    (index,) = load.index
    if isinstance(index, Expr) or looped.symbol in index.free_symbols:
        return False
    return _groups(layout, index) is not None


def extreme(values: Values, load: Load, *, greatest: bool) -> Code:
    """Return the minimum or maximum of the numbers that the rows of this program load; see `is_shared`."""
    numbers = list(_numbers(values, load, greatest=greatest))
    joined = "tl.maximum({}, {})" if greatest else "tl.minimum({}, {})"
    return reduce(lambda a, b: compose(joined, a, b), numbers)


def _numbers(values: Values, load: Load, *, greatest: bool) -> Iterator[Code]:
    """Yield the number of each group of rows; for groups past the last row, one that does not change the extreme."""
    layout, (index,) = values.layout, load.index
    assert not isinstance(index, Expr), "called for shared numbers"
    groups = _groups(layout, index)
    assert groups is not None, "called for shared numbers"
    dim, starts = groups
    info = torch.iinfo(load.dtype)
    for start in starts:
        ragged = dim is not None and start > 0 and layout.masked(dim)
        key = ("shared number", load, start, greatest and ragged)
        known = values.find(key)
        if known is None:
            row = None if dim is None else start_symbol(dim) + start
            place = index if dim is None or row is None else index.xreplace({dim.symbol: row})
            pointer = compose("{} + {}", values.pointer_name(load.buffer), values.index_tile(place).code)
            if ragged and dim is not None and row is not None:
                inside = compose("{} < {}", values.index_tile(row).code, values.index_tile(dim.size).code)
                other = literal(info.min if greatest else info.max, load.dtype)
                pointer = compose("{}, {}, {}", pointer, inside, other)
            number = Tile(compose("tl.load({})", pointer), depth=values.depth)
            known = values.bind(key, values.name(load.buffer, number))
        yield known.code


def _groups(layout: Layout, index: sympy.Expr) -> tuple[Dim | None, range] | None:
    """Return the dimension of rows by whose groups `index` is determined, and the first row of each group in a program.

    The dimension is None for an index that depends on no row; None if it differs from row to row.
    """
    tiled = layout.spanned(index)
    if not tiled:
        return None, range(1)
    dim, block = tiled[0], layout.config.block(tiled[0].name)
    quotients = (part.args[1] for part in index.atoms(FloorDiv) if part.args[0] == dim.symbol)
    sizes = {int(size) for size in quotients if size.is_Integer}
    if len(tiled) > 1 or dim.role is not Role.GRID or len(sizes) != 1:
        return None
    (size,) = sizes
    if dim.symbol in index.xreplace({FloorDiv(dim.symbol, sympy.Integer(size)): sympy.Integer(0)}).free_symbols:
        return None
    if (block % size and size % block) or block > _MOST_GROUPS * size:
        return None
    return dim, range(0, block, size)
