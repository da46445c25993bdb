"""Lowers reads at positions that are loaded: indexing by tensors, gather, embedding.

Negative positions count from the end where eager allows them.  A position out of range fails a check, as in eager;
along a dimension that may be empty, which such a check cannot express, the call stays an extern.  So do masks (bool
indices), whose results have a data-dependent size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.checks.checked import checked, is_within, wrapped
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, axis_symbol, bounds, substitute
from fusion.lowering.ir.error_messages import Wording, wording_of
from fusion.lowering.ir.expr import Expr, Index, IndexValue, Op, make_cast, postorder
from fusion.lowering.ir.scalar_ops import CHECKED
from fusion.lowering.ir.sizes import may_be_empty
from fusion.lowering.registry import lowers
from fusion.lowering.rules.entries import held
from fusion.lowering.rules.formula import Term, literal, where
from fusion.lowering.rules.promotion import convert
from fusion.lowering.value import Shape, Value, axes_of, axis_bounds, broadcast_shapes, broadcast_to, reshape

aten = torch.ops.aten


def position(index: Value, size: sympy.Expr, dim: int, *, wrap: bool, wording: Wording, check: bool = True) -> Index:
    """Return the positions along dimension `dim` in an index tensor, over its own axes; with `wrap`, negative ones
    count from the end.

    Args:
        size: the size of that dimension.
        wording: eager's message for a position out of range.
        check: whether a position may be out of range.

    Raises:
        Unsupported: the tensor is a mask, or not of integers; or the dimension may be empty.
    """
    if index.dtype in (torch.bool, torch.uint8) or index.dtype.is_floating_point:
        raise Unsupported(f"index of {index.dtype}")
    expr = make_cast(index.expr, torch.int64)
    if isinstance(expr, IndexValue) and expr.dtype is torch.int64:
        known = bounds(expr.index, axis_bounds(index.shape))
        is_positive = known is not None and known[0] >= 0
        if is_within(expr.index, size, index.shape) or (is_positive and not check):
            return expr.index
    if check and 0 not in index.shape:
        if may_be_empty(size):
            raise Unsupported(f"positions along a dimension of size {size}")
        return checked(expr, size, dim, wrap=wrap, wording=wording)
    return wrapped(checked(expr, size, dim, wrap=wrap, wording=wording))


def looked_up(x: Value, shape: Shape, source: Sequence[Index]) -> Value:
    """Return `x.view(shape, source)`, also with the checks along dimensions where x is constant."""
    result = x.view(shape, source)
    kept = set(postorder(result.expr))
    for index in source:
        if isinstance(index, Op) and index.name == CHECKED and index not in kept:
            checked_value = where(Term(index) >= 0, Term(result.expr), 0)
            result = Value(shape, x.dtype, x.device, checked_value.expr)
    return result


def _moved(index: Index, axes: Mapping[sympy.Symbol, sympy.Expr], shape: Shape) -> Index:
    if isinstance(index, Expr):
        return substitute(index, axes, axis_bounds(shape))
    return index.xreplace(axes)


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(ctx: Builder, x: Value, indices: Sequence[Value | None]) -> Value:
    """x[indices]: the axes of the broadcast index tensors replace adjacent indices, else they come first."""
    check = ctx.current.target is aten.index.Tensor
    return looked_up(x, *indexed(x.shape, indices, check=check)) if any(index is not None for index in indices) else x


def indexed(whole: Shape, indices: Sequence[Value | None], *, check: bool) -> tuple[Shape, list[Index]]:
    """Return the shape of x[indices], for an x of shape `whole`, and the position in x of each of its elements."""
    index_tensors = [(k, index) for k, index in enumerate(indices) if index is not None]
    common = broadcast_shapes([index.shape for _, index in index_tensors])
    used = [k for k, _ in index_tensors]
    adjacent = used == list(range(used[0], used[0] + len(used)))
    front = used[0] if adjacent else 0
    kept = [k for k in range(len(whole)) if k not in used]
    shape = (*(whole[k] for k in kept[:front]), *common, *(whole[k] for k in kept[front:]))
    source: list[Index] = [axis_symbol(0)] * len(whole)
    for place, k in enumerate(kept):
        source[k] = axis_symbol(place if place < front else place + len(common))
    shifted = {axis_symbol(k): axis_symbol(front + k) for k in range(len(common))}
    for number, (k, index) in enumerate(index_tensors):  # eager counts the dimensions that are indexed
        expanded = broadcast_to(index, common)
        at = position(expanded, whole[k], number, wrap=True, wording=Wording.SUBSCRIPT, check=check)
        source[k] = _moved(at, shifted, shape)
    return shape, source


@lowers(aten.gather.default)
def gather(ctx: Builder, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    """x at the positions along `dim` in `index`; the result has the shape of `index`, and any rank if that is empty."""
    if 0 in index.shape:
        return held(index.shape, x, Term(literal(0, x.dtype)))
    wording, index = wording_of(ctx.current, Wording.ELEMENT), convert(index, torch.int64)
    if x.rank == 0:
        return looked_up(reshape(x, (ONE,)), index.shape, [position(index, ONE, 0, wrap=False, wording=wording)])
    source: list[Index] = list(axes_of(index.shape)) or [axis_symbol(0)]
    dim %= x.rank
    source[dim] = position(index, x.shape[dim], dim, wrap=False, wording=wording)
    return looked_up(x, index.shape, source)


@lowers(aten.index_select.default)
def index_select(ctx: Builder, x: Value, dim: int, index: Value) -> Value:
    """x at the positions along `dim` in the 1-d `index`."""
    if x.rank == 0:
        at = position(reshape(index, ()), ONE, 0, wrap=False, wording=Wording.ROW)
        return looked_up(reshape(x, (ONE,)), (), [at])
    dim %= x.rank
    if index.rank == 0:
        index = reshape(index, (sympy.Integer(1),))
    shape = (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
    source: list[Index] = list(axes_of(shape))
    wording = Wording.COLUMN if dim == 1 else Wording.ROW
    at = position(index, x.shape[dim], dim, wrap=False, wording=wording)
    source[dim] = _moved(at, {axis_symbol(0): axis_symbol(dim)}, shape)
    return looked_up(x, shape, source)


@lowers(aten.embedding.default)
def embedding(
    ctx: Builder,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    """The rows of `weight` at `indices`, whose shape the result has, with one more dimension."""
    shape = (*indices.shape, weight.shape[1])
    row = position(indices, weight.shape[0], 0, wrap=False, wording=Wording.ROW)
    return looked_up(weight, shape, [row, axis_symbol(indices.rank)])


@lowers(aten.take.default)
def take(ctx: Builder, x: Value, index: Value) -> Value:
    """x, flattened, at the positions in `index`."""
    total = sympy.Mul(*x.shape)
    at = position(index, total, 0, wrap=True, wording=Wording.FLAT)
    return looked_up(reshape(x, (total,)), index.shape, [at])
