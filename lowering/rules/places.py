"""Computes the indices of the sources of a write, one for each dimension of the target.

Input: tensors of positions along a dimension, one for each source or one for each slice; output: indices over the axes
of the sources.  A position that eager would refuse fails a check.
"""

from __future__ import annotations

import sympy
import torch

from fusion.lowering.indexing import ONE, ZERO, axis_symbol
from fusion.lowering.ir.error_messages import Wording
from fusion.lowering.ir.expr import Expr, Index, IndexValue
from fusion.lowering.rules.gather import position
from fusion.lowering.rules.promotion import convert
from fusion.lowering.value import Shape, Value, axes_of, reshape


def laid_flat(index: Value) -> Value:
    """Flatten a tensor to a vector."""
    return reshape(index, (sympy.Mul(*index.shape),))


def positions(index: Value, size: sympy.Expr, dim: int, *, wrap: bool, wording: Wording, check: bool = True) -> Value:
    """Apply `position` to an index, as a tensor."""
    named = position(index, size, dim, wrap=wrap, wording=wording, check=check)
    expr = named if isinstance(named, Expr) else IndexValue(named)
    return Value(index.shape, torch.int64, index.device, expr)


def aligned(values: Value, shape: Shape) -> Value:
    """Drop leading dimensions of size 1 from `values` that `shape` does not have."""
    extra = values.rank - len(shape)
    if extra <= 0:
        return values
    index = [ZERO] * extra + [axis_symbol(k) for k in range(len(shape))]
    return values.view(values.shape[extra:], index)


def along(dim: int, index: Value) -> list[Index]:
    """Return the indices of sources in the shape of `index`, which holds their positions along `dim`."""
    place: list[Index] = list(axes_of(index.shape))
    place[dim] = _as_index(index)
    return place


def named_along(x: Value, dim: int, index: Value, wording: Wording) -> Value:
    """Return the positions along `dim` in an index for each source; a 0-d x has the single position 0."""
    size = x.shape[dim] if x.rank else ONE
    return positions(convert(index, torch.int64), size, dim % max(x.rank, 1), wrap=False, wording=wording)


def _as_index(index: Value) -> Index:
    """Return a tensor of positions as an index: affine if it is."""
    return index.expr.index if isinstance(index.expr, IndexValue) else index.expr


def rows(index: Value, dim: int, shape: Shape) -> list[Index]:
    """Return the indices of sources of this shape whose slices along `dim` are at the 1-d `index`."""
    place: list[Index] = list(axes_of(shape))
    place[dim] = _as_index(index.view(shape, [axis_symbol(dim)]))
    return place


def sources_at(src: Value, index: Value) -> Value:
    """Return `src` restricted to the shape of `index`, since sources without an index are ignored."""
    return src if src.shape == index.shape else src.view(index.shape, axes_of(index.shape))
