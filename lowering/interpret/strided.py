"""Finds the elements at affine positions as a strided view, without a tensor of positions.

Input: a tensor, an index of which each position is a sum of axes times numbers, and the range of each axis; output: a
view, or None where the positions are not affine, reach outside, or run backwards.  The bounds are exact: an affine
position is smallest and largest at corners of the box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import sympy
import torch

from fusion.lowering.ir.expr import Expr, Index
from fusion.lowering.ir.sizes import size_value

_ONE = sympy.Integer(1)


def strided_view(
    tensor: torch.Tensor, index: Sequence[Index], axes: Mapping[sympy.Symbol, range], sizes: Mapping[sympy.Symbol, int]
) -> torch.Tensor | None:
    """Return the elements at `index` as a view, of size 1 along axes that do not occur; None if there is no such view.

    >>> i, j = sympy.symbols("i j", integer=True)
    >>> strided_view(torch.arange(6), [2 * j + 1], {i: range(3), j: range(1, 3)}, {})
    tensor([[3, 5]])
    >>> strided_view(torch.arange(6), [2 * j + 1], {j: range(4)}, {}) is None  # it reaches 7
    True
    """
    start, strides = tensor.storage_offset(), dict[sympy.Expr, int]()
    for position, size, stride in zip(index, tensor.shape, tensor.stride(), strict=True):
        terms = None if isinstance(position, Expr) else affine(position, frozenset(axes))
        if terms is None:
            return None
        first = last = origin = 0
        for axis, factor in terms.items():
            number = size_value(factor, sizes)
            span = axes[axis] if isinstance(axis, sympy.Symbol) else range(1, 2)
            ends = number * span.start, number * (span.stop - 1)
            first, last, origin = first + min(ends), last + max(ends), origin + ends[0]
            if axis != _ONE:
                strides[axis] = strides.get(axis, 0) + number * stride
        if first < 0 or last >= size:
            return None
        start += origin * stride
    if any(stride < 0 for stride in strides.values()):
        return None
    shape = [len(span) if axis in strides else 1 for axis, span in axes.items()]
    return torch.as_strided(tensor, shape, [strides.get(axis, 0) for axis in axes], start)


def overlaps(view: torch.Tensor) -> bool:
    """Return whether two elements of a view may share memory."""
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


@lru_cache(maxsize=1 << 14)
def affine(expr: sympy.Expr, axes: frozenset[sympy.Symbol]) -> dict[sympy.Expr, sympy.Expr] | None:
    """Return the factor of each axis, and the rest under 1; None if the expression is not affine in the axes.

    >>> i, n = sympy.symbols("i n", integer=True)
    >>> affine(n * (2 * i + 1), frozenset([i]))
    {1: n, i: 2*n}
    >>> affine(i * i, frozenset([i])) is None
    True
    """
    if not expr.free_symbols & axes:
        return {_ONE: expr}
    if expr in axes:
        return {expr: _ONE}
    if expr.is_Add:
        terms: dict[sympy.Expr, sympy.Expr] = {}
        for arg in expr.args:
            inner = affine(arg, axes)
            if inner is None:
                return None
            for axis, factor in inner.items():
                terms[axis] = terms.get(axis, sympy.Integer(0)) + factor
        return terms
    if expr.is_Mul:
        varying = [arg for arg in expr.args if arg.free_symbols & axes]
        inner = affine(varying[0], axes) if len(varying) == 1 else None
        fixed = sympy.Mul(*(arg for arg in expr.args if arg not in varying))
        return None if inner is None else {axis: factor * fixed for axis, factor in inner.items()}
    return None


__all__ = ["affine", "overlaps", "strided_view"]
