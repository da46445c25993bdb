"""Lowers writes of slices, of elements at a list of positions, and under a mask.

With few comparisons, each element searches the last source that names it; else the sources are scattered
(`collisions`).  Of sources with one position the last one wins, or they are added (`scatter`).
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, axis_symbol
from fusion.lowering.ir.error_messages import Wording
from fusion.lowering.ir.expr import Index, IndexValue, make_cast
from fusion.lowering.registry import lowers
from fusion.lowering.rules.assembly import placed
from fusion.lowering.rules.collisions import folded, updates_input, written
from fusion.lowering.rules.compared import is_few
from fusion.lowering.rules.formula import Term, eq, literal, where
from fusion.lowering.rules.gather import indexed
from fusion.lowering.rules.masked import numbered_sources
from fusion.lowering.rules.places import aligned, laid_flat, positions, rows
from fusion.lowering.rules.promotion import Argument, combine, convert, term_of, widened
from fusion.lowering.rules.runs import summed_in_runs
from fusion.lowering.rules.scatter import summed
from fusion.lowering.value import Value, axes_of, broadcast_to, reshape

aten = torch.ops.aten


def last_source(ctx: Builder, index: Value, size: sympy.Expr) -> Value:
    """Return for each of `size` positions the last element of the 1-d `index` that names it, -1 if there is none."""
    if index.shape[0] == 0:
        return Value((size,), torch.int64, index.device, literal(-1, torch.int64))
    places = (size, index.shape[0])
    source = Term(IndexValue(axis_symbol(1)))
    hit = eq(Term(index.view(places, [axis_symbol(1)]).expr), Term(IndexValue(axis_symbol(0))))
    chosen = Value(places, torch.int64, index.device, where(hit, source, -1).expr)
    return ctx.reduce("max", [chosen], [1])


@lowers(aten.index_copy.default)
def index_copy(ctx: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    """x with slices along `dim` replaced by slices of `source`."""
    if x.rank == 0:
        return reshape(index_copy(ctx, reshape(x, (ONE,)), 0, index, reshape(source, (ONE,))), ())
    dim %= x.rank
    if source.rank == 0:
        source = reshape(source, (ONE,) * x.rank)
    at = positions(laid_flat(index), x.shape[dim], dim, wrap=False, wording=Wording.COPIED)
    return _copied(ctx, x, dim, at, source)


def _copied(ctx: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    """Copy slices to positions that are checked already."""
    if 0 in source.shape:
        return x
    if updates_input(ctx) or not is_few(source.shape[dim] * x.shape[dim]):
        return written(ctx, x, rows(index, dim, source.shape), source)
    last = last_source(ctx, index, x.shape[dim])
    at = last.view(x.shape, [axis_symbol(dim)])
    named = Term(at.expr) >= 0
    where_from: list[Index] = list(axes_of(x.shape))
    where_from[dim] = at.expr
    read = placed(source, x.shape, where_from, named)
    return Value(x.shape, x.dtype, x.device, where(named, read, Term(x.expr)).expr)


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(ctx: Builder, x: Value, dim: int, index: Value, value: Argument) -> Value:
    """x with slices along `dim` filled with one number."""
    filler = convert(value, x.dtype) if isinstance(value, Value) else value
    if x.rank == 0:
        return reshape(index_fill(ctx, reshape(x, (ONE,)), 0, index, filler), ())
    dim %= x.rank
    count = sympy.Mul(*index.shape)
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
    if 0 in shape:
        return x
    at = positions(laid_flat(index), x.shape[dim], dim, wrap=True, wording=Wording.SUBSCRIPT)
    if updates_input(ctx) or not is_few(count * x.shape[dim]):
        filling = Value(shape, x.dtype, x.device, term_of(filler, shape, x.dtype).expr)
        return written(ctx, x, rows(at, dim, shape), filling)
    last = last_source(ctx, at, x.shape[dim])
    named = Term(last.view(x.shape, [axis_symbol(dim)]).expr) >= 0
    return Value(x.shape, x.dtype, x.device, where(named, term_of(filler, x.shape, x.dtype), Term(x.expr)).expr)


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    ctx: Builder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    """x[indices] = values, or += with `accumulate`; a boolean mask only with a single value."""
    index_tensors = [(k, index) for k, index in enumerate(indices) if index is not None]
    if len(index_tensors) == 1 and index_tensors[0][1].dtype in (torch.bool, torch.uint8):
        return _under_mask(ctx, x, index_tensors[0][0], index_tensors[0][1], values, accumulate)
    if not index_tensors:
        raise Unsupported("no index")
    if accumulate and not updates_input(ctx):
        shape, place = indexed(x.shape, indices, check=False)  # positions of runs are known to be in range
        source = convert(broadcast_to(aligned(values, shape), shape), x.dtype)
        if (in_runs := summed_in_runs(ctx, x, place, source)) is not None:
            return in_runs
    dim, index = index_tensors[0]
    compared = sympy.Mul(*index.shape) * (sympy.Mul(*x.shape) if accumulate else x.shape[dim])
    exact = not accumulate or x.dtype.itemsize >= 4  # else it is accumulated in another tensor
    if len(index_tensors) > 1 or (exact and updates_input(ctx)) or not is_few(compared):
        shape, place = indexed(x.shape, indices, check=_is_checked(ctx))
        source = convert(broadcast_to(aligned(values, shape), shape), x.dtype)
        return folded(ctx, "sum", x, place, source) if accumulate else written(ctx, x, place, source)
    # the source's dimensions: those before `dim`, those of the index, those after
    shape = (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
    source = broadcast_to(aligned(values, shape), shape)
    flat = reshape(source, (*x.shape[:dim], sympy.Mul(*index.shape), *x.shape[dim + 1 :]))
    checks = _is_checked(ctx)
    at = laid_flat(positions(index, x.shape[dim], 0, wrap=True, wording=Wording.SUBSCRIPT, check=checks))
    return summed(ctx, x, dim, at, flat) if accumulate else _copied(ctx, x, dim, at, flat)


def _is_checked(ctx: Builder) -> bool:
    """Return whether the current call checks that positions are in range."""
    return ctx.current.target is not aten._unsafe_index_put.default


@lowers(aten.put.default)
def put(ctx: Builder, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    """x, flattened, with `source` written, or added, at the positions in `index`."""
    total = sympy.Mul(*x.shape)
    flat, new = reshape(x, (total,)), laid_flat(source)
    at = positions(laid_flat(index), total, 0, wrap=True, wording=Wording.FLAT)
    result = summed(ctx, flat, 0, at, new) if accumulate else _copied(ctx, flat, 0, at, new)
    return reshape(result, x.shape)


def _under_mask(ctx: Builder, x: Value, first: int, mask: Value, values: Value, accumulate: bool) -> Value:
    """Write or add values, one number or several in order, where a mask over some adjacent dimensions holds."""
    if mask.shape != x.shape[first : first + mask.rank]:
        raise Unsupported(f"a mask of shape {list(mask.shape)}")  # eager refuses another shape
    if all(size == 1 for size in values.shape):
        number = reshape(values, ())
    elif mask.dtype is torch.bool:
        number = numbered_sources(ctx, x, first, mask, values)
    else:
        raise Unsupported("a source for each place that a mask of bytes holds")
    spread = mask.view(x.shape, [axis_symbol(first + k) for k in range(mask.rank)])
    if not accumulate:
        return combine(lambda m, v, old: where(m, v, old), convert(spread, torch.bool), number, x)
    compute = widened(x.dtype)
    old = Term(make_cast(x.expr, compute))
    total = where(Term(make_cast(spread.expr, torch.bool)), old + term_of(number, x.shape, compute), old)
    return Value(x.shape, x.dtype, x.device, total.to(x.dtype, implicit=True).expr)
