"""Converts several indices and their strides to one memory offset, and back."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from fusion.lowering.indexing.intervals import Sizes
from fusion.lowering.indexing.laws import simplify
from fusion.lowering.ir.affine import coefficient
from fusion.lowering.ir.division import ZERO, FloorDiv, Mod
from fusion.lowering.ir.expr import Const, Expr, Index, IndexValue, Op, free_axes, make_op
from fusion.lowering.ir.sizes import where_there_are_elements

RUN = 16
"""The least number of contiguous elements for which one lane each is worthwhile."""


def flatten(index: Sequence[Index], strides: Sequence[sympy.Expr], sizes: Sizes) -> Index:
    """Return the offset in elements of a multi-dimensional index."""
    affine: sympy.Expr = ZERO
    indirect: list[Expr] = []
    for position, stride in zip(index, strides, strict=True):
        step = where_there_are_elements(stride)
        if isinstance(position, Expr):
            scaled = position if step == 1 else make_op("mul", position, IndexValue(step))
            if not (isinstance(position, Const) and position.value == 0):
                indirect.append(scaled)
        else:
            affine += position * step
    affine = simplify(sympy.expand_mul(affine), sizes)
    if not indirect:
        return affine
    total: Expr = indirect[0]
    for part in indirect[1:]:
        total = Op("add", (total, part), torch.int64)
    return total if affine == 0 else make_op("add", total, IndexValue(affine))


def direct_part(offset: Index) -> tuple[sympy.Expr, frozenset[sympy.Symbol]]:
    """Return the part of an offset that does not depend on data, and the axes on which the rest depends.

    >>> from torch import int64
    >>> from fusion.lowering.ir.expr import Load
    >>> from fusion.lowering.indexing import axis_symbol
    >>> i, j = axis_symbol(0), axis_symbol(1)
    >>> row = make_op("mul", Load("ids", (i,), int64), IndexValue(sympy.Integer(512)))
    >>> direct_part(make_op("add", row, IndexValue(j)))
    (i1, frozenset({i0}))
    """
    if not isinstance(offset, Expr):
        return offset, frozenset()
    direct, rest, todo = ZERO, list[Expr](), [offset]
    while todo:
        term = todo.pop()
        if isinstance(term, Op) and term.name == "add":
            todo += term.args
        elif isinstance(term, IndexValue):
            direct += term.index
        else:
            rest.append(term)
    return direct, free_axes(*rest)


def stride_along(offset: Index, axis: sympy.Symbol) -> sympy.Expr | None:
    """Return the stride of `axis` in an offset that may depend on data; None where it is not known."""
    direct, others = direct_part(offset)
    return None if axis in others else coefficient(direct, axis)


def within_run(offset: sympy.Expr, axis: sympy.Symbol) -> sympy.Expr:
    """Return `offset` as it varies along `axis` before a digit carries: heads of 64 contiguous elements are runs.

    >>> from fusion.lowering.indexing import axis_symbol
    >>> i = axis_symbol(0)
    >>> within_run(65536 * FloorDiv(i, 64) + Mod(i, 64), i)
    i0
    """

    def is_long(expr: sympy.Basic) -> bool:
        if not isinstance(expr, (FloorDiv, Mod)) or axis not in expr.free_symbols:
            return False
        return bool(expr.args[1].is_Integer and expr.args[1] >= RUN)

    return offset.replace(is_long, lambda expr: ZERO if isinstance(expr, FloorDiv) else expr.args[0])
