"""Reads at positions that are themselves loaded: indexing by tensors, gather, embedding.

Negative positions count from the end where eager lets them.  A position out of range is the caller's error: eager
raises, a kernel cannot.  Masks (bool indices) have results of unknown size and stay externs.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from lowering.builder import Builder
from lowering.errors import Unsupported
from lowering.expr import Expr, Index, IndexValue, make_cast
from lowering.indexing import axis_symbol, bounds, substitute
from lowering.registry import lowers
from lowering.rules.formula import Term, where
from lowering.rules.promotion import convert
from lowering.value import Shape, Value, axes_of, axis_bounds, broadcast_shapes, broadcast_to, reshape

aten = torch.ops.aten


def position(index: Value, size: sympy.Expr, *, wrap: bool) -> Index:
    """The positions held by an index tensor, over its own axes; with `wrap`, negative ones count from the end.

    Raises:
        Unsupported: the tensor is a mask, or not of integers.
    """
    if index.dtype in (torch.bool, torch.uint8) or index.dtype.is_floating_point:
        raise Unsupported(f"index of {index.dtype}")
    expr = make_cast(index.expr, torch.int64)
    if isinstance(expr, IndexValue) and expr.dtype is torch.int64:
        known = bounds(expr.index, axis_bounds(index.shape))
        if known is not None and known[0] >= 0:
            return expr.index
    if not wrap:
        return expr
    at = Term(expr)
    return where(at < 0, at + size, at).expr


def _moved(index: Index, axes: dict[sympy.Symbol, sympy.Expr], shape: Shape) -> Index:
    if isinstance(index, Expr):
        return substitute(index, axes, axis_bounds(shape))
    return index.xreplace(axes)


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(ctx: Builder, x: Value, indices: Sequence[Value | None]) -> Value:
    """x[indices]: the broadcast index tensors' axes stand where the indices are adjacent, else in front."""
    return x.view(*indexed(x.shape, indices)) if any(index is not None for index in indices) else x


def indexed(whole: Shape, indices: Sequence[Value | None]) -> tuple[Shape, list[Index]]:
    """The shape of x[indices], for an x of shape `whole`, and where each of its elements is in x."""
    given = [(k, index) for k, index in enumerate(indices) if index is not None]
    common = broadcast_shapes([index.shape for _, index in given])
    used = [k for k, _ in given]
    adjacent = used == list(range(used[0], used[0] + len(used)))
    front = used[0] if adjacent else 0
    kept = [k for k in range(len(whole)) if k not in used]
    shape = (*(whole[k] for k in kept[:front]), *common, *(whole[k] for k in kept[front:]))
    source: list[Index] = [axis_symbol(0)] * len(whole)
    for place, k in enumerate(kept):
        source[k] = axis_symbol(place if place < front else place + len(common))
    shifted = {axis_symbol(k): axis_symbol(front + k) for k in range(len(common))}
    for k, index in given:
        at = position(broadcast_to(index, common), whole[k], wrap=True)
        source[k] = _moved(at, shifted, shape)
    return shape, source


@lowers(aten.gather.default)
def gather(ctx: Builder, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    """x at the positions along `dim` that `index` holds; the result has the shape of `index`."""
    if x.rank == 0:
        return reshape(x, index.shape) if index.rank == 0 else x.view(index.shape, [])
    source: list[Index] = list(axes_of(index.shape)) or [axis_symbol(0)]
    source[dim % x.rank] = position(convert(index, torch.int64), x.shape[dim], wrap=False)
    return x.view(index.shape, source)


@lowers(aten.index_select.default)
def index_select(ctx: Builder, x: Value, dim: int, index: Value) -> Value:
    """x at the positions along `dim` that the 1-d `index` holds."""
    if x.rank == 0:
        return x
    dim %= x.rank
    if index.rank == 0:
        index = reshape(index, (sympy.Integer(1),))
    shape = (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
    source: list[Index] = list(axes_of(shape))
    at = position(index, x.shape[dim], wrap=False)
    source[dim] = _moved(at, {axis_symbol(0): axis_symbol(dim)}, shape)
    return x.view(shape, source)


@lowers(aten.embedding.default)
def embedding(
    ctx: Builder,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    """The rows of `weight` that `indices` names; the result has their shape and one more dimension."""
    shape = (*indices.shape, weight.shape[1])
    return weight.view(shape, [position(indices, weight.shape[0], wrap=False), axis_symbol(indices.rank)])


@lowers(aten.take.default)
def take(ctx: Builder, x: Value, index: Value) -> Value:
    """x laid flat, at the positions that `index` holds."""
    total = sympy.Mul(*x.shape)
    return reshape(x, (total,)).view(index.shape, [position(index, total, wrap=True)])
