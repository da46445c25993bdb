"""Whether a block of a loop can change anything: `Loop.where` over a whole block, as a C condition.

What enters is a bool expression and how far each axis runs; what leaves is a C text that is false only where the
expression is false throughout.  Comparisons of affine indices are settled by the corner of the block that favours them,
`and` and `or` by their parts; anything else counts as true.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy

from codegen.c.blocks import Blocks
from codegen.c.indices import Names, index_text
from lowering.expr import Cast, Const, Expr, IndexValue, Op
from lowering.indexing import ZERO, coefficient, symbols_of

ALWAYS = "1"

_SWAPPED = {"ge": "le", "gt": "lt"}
_SIGNS = {"le": "<=", "lt": "<"}


def possible(where: Expr, blocks: Blocks, names: Names) -> str:
    """C text: may `where` be true somewhere in the current block?  `ALWAYS` where that is not known to be decidable.

    Each cut axis `i` runs from `i_0` up to `i_end`; every other GRID or LOOP axis stands at one point.
    """
    if isinstance(where, Const):
        return ALWAYS if where.value else "0"
    if not isinstance(where, Op):
        return ALWAYS
    if where.name in ("and", "or"):
        parts = [possible(arg, blocks, names) for arg in where.args]
        if where.name == "or":
            return ALWAYS if ALWAYS in parts else f"({parts[0]} | {parts[1]})"
        kept = [part for part in parts if part != ALWAYS]
        return f"({' & '.join(kept)})" if len(kept) > 1 else kept[0] if kept else ALWAYS
    if where.name in ("le", "lt", "ge", "gt", "eq"):
        left, right = (_affine(arg) for arg in where.args)
        if left is None or right is None:
            return ALWAYS
        if where.name == "eq":
            return _both(_below(left - right, "<=", blocks, names), _below(right - left, "<=", blocks, names))
        if where.name in _SWAPPED:
            return _below(right - left, _SIGNS[_SWAPPED[where.name]], blocks, names)
        return _below(left - right, _SIGNS[where.name], blocks, names)
    return ALWAYS


def _both(left: str, right: str) -> str:
    return right if left == ALWAYS else left if right == ALWAYS else f"({left} & {right})"


def _below(difference: sympy.Expr, sign: str, blocks: Blocks, names: Names) -> str:
    """May `difference` be below zero (`<`), or not above it (`<=`)?"""
    least = _least(sympy.expand_mul(difference), blocks)
    if least is None:
        return ALWAYS
    ends = {symbol: symbol.name for symbol in least.free_symbols if symbol not in names}
    return f"({index_text(least, {**names, **ends})} {sign} 0)"


def _least(expr: sympy.Expr, blocks: Blocks) -> sympy.Expr | None:
    """The least value that `expr` has in the current block; None where it is not affine."""
    corner: dict[sympy.Symbol, sympy.Expr] = {}
    for symbol in symbols_of(expr):
        block = blocks.of.get(symbol)
        if block is None or block.bound is None:
            continue
        weight = coefficient(expr, symbol)
        if weight is None or not (weight.is_nonnegative or weight.is_nonpositive):
            return None
        extent = block.extent
        first = ZERO if extent.start == "0" else sympy.Symbol(extent.start, integer=True)
        after = block.axis.size if extent.start == "0" else sympy.Symbol(extent.end, integer=True)
        corner[symbol] = first if weight.is_nonnegative else after - 1
    return sympy.expand_mul(expr.xreplace(corner))


_INDEX_OPS: dict[str, Callable[..., sympy.Expr]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
}


def _affine(expr: Expr) -> sympy.Expr | None:
    """An integer expression as an index; None where it holds more than indices and their sums and products."""
    if expr.dtype.is_floating_point:
        return None
    if isinstance(expr, IndexValue):
        return expr.index
    if isinstance(expr, Const):
        return sympy.Integer(int(expr.value))
    if isinstance(expr, Cast) and expr.dtype.itemsize >= 4:
        return _affine(expr.arg)
    if isinstance(expr, Op) and expr.name in _INDEX_OPS:
        parts = [_affine(arg) for arg in expr.args]
        known = [part for part in parts if part is not None]
        return _INDEX_OPS[expr.name](*known) if len(known) == len(parts) else None
    return None
