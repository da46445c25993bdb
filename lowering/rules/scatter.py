"""Lowers writes along one dimension, with positions for each row.

With few comparisons, each element searches the sources that name it (`compared`): if each row has one source, an
element compares its position with that; else the sources with one position are folded, and the last one wins or they
are added.  Where that would take many comparisons, the sources are scattered (`collisions`).
"""

from __future__ import annotations

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, axis_symbol
from fusion.lowering.ir.error_messages import Wording, wording_of
from fusion.lowering.ir.expr import Index, IndexValue
from fusion.lowering.ir.scalar_ops import JoinName, identity
from fusion.lowering.registry import lowers
from fusion.lowering.rules.assembly import placed
from fusion.lowering.rules.collisions import JOINS, folded, written
from fusion.lowering.rules.compared import folded_sources, is_compared, is_one, sources_of_each
from fusion.lowering.rules.formula import Term, eq, literal, maximum, where
from fusion.lowering.rules.places import along, laid_flat, named_along, positions, sources_at
from fusion.lowering.rules.promotion import Argument, combine, convert, term_of, widened
from fusion.lowering.value import Value, axes_of, reshape

aten = torch.ops.aten


@lowers(aten.scatter.value)
def scatter_value(ctx: Builder, x: Value, dim: int, index: Value, value: Argument) -> Value:
    """x with `value` written at `index`."""
    index = named_along(x, dim, index, wording_of(ctx.current, Wording.ELEMENT))
    if not is_compared(x, dim, index):
        source = Value(index.shape, x.dtype, x.device, term_of(value, index.shape, x.dtype).expr)
        return written(ctx, x, along(dim, index), source)
    named, _ = sources_of_each(x, dim, index, None)
    hit = named if is_one(x, dim, index) else folded_sources(ctx, "any", named, x)
    return combine(lambda h, old: where(h, term_of(value, x.shape, x.dtype), old), hit, x)


@lowers(aten.scatter.src)
def scatter_src(ctx: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    """x with `src` written at `index`; of sources with one index, any one stays."""
    return _written(ctx, x, dim, named_along(x, dim, index, wording_of(ctx.current, Wording.ELEMENT)), src)


def _written(ctx: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    """x with `src` written at positions that are checked already."""
    if not is_compared(x, dim, index):
        return written(ctx, x, along(dim, index), sources_at(src, index))
    named, source = sources_of_each(x, dim, index, src)
    if is_one(x, dim, index):
        return combine(lambda h, new, old: where(h, new, old), named, source, x)
    order = combine(lambda h: where(h, Term(IndexValue(axis_symbol(x.rank))), -1), named)
    last = folded_sources(ctx, "max", order, x)
    dim %= x.rank
    source_index: list[Index] = list(axes_of(x.shape))
    source_index[dim] = last.expr
    hit = Term(last.expr) >= 0
    read = placed(src, x.shape, source_index, hit)
    return Value(x.shape, x.dtype, x.device, where(hit, read, Term(x.expr)).expr)


@lowers(aten.scatter_add.default)
def scatter_add(ctx: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    """x with `src` added at `index`."""
    return _added_along(ctx, x, dim, named_along(x, dim, index, Wording.ELEMENT), src)


def _added_along(ctx: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    """x with `src` added at positions that are checked already."""
    if not is_compared(x, dim, index):
        return folded(ctx, "sum", x, along(dim, index), sources_at(src, index))
    return _added(ctx, x, *sources_of_each(x, dim, index, src), one=is_one(x, dim, index))


@lowers(aten.index_add.default)
def index_add(ctx: Builder, x: Value, dim: int, index: Value, source: Value, *, alpha: Argument = 1) -> Value:
    """x with alpha times the slices of `source` added at the positions along `dim` in the 1-d `index`."""
    if x.rank == 0:
        source, whole = reshape(source, (sympy.Mul(*source.shape),)), reshape(x, (ONE,))
        return reshape(index_add(ctx, whole, 0, laid_flat(index), source, alpha=alpha), ())
    dim %= x.rank
    scaled = source if alpha == 1 else combine(lambda a: a * term_of(alpha, source.shape, source.dtype), source)
    by_scatter = x.rank > 1 and dim in (0, x.rank - 1) and alpha == 1 and index.dtype is torch.int64
    wording = Wording.ELEMENT if by_scatter else Wording.ROW  # eager scatters into the outermost or innermost dimension
    return summed(ctx, x, dim, positions(laid_flat(index), x.shape[dim], dim, wrap=False, wording=wording), scaled)


def summed(ctx: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    """Add the slices of `source` to x at positions that are checked already."""
    return _added_along(ctx, x, dim, index.view(source.shape, [axis_symbol(dim)]), source)


@lowers(aten.embedding_dense_backward.default)
def embedding_backward(
    ctx: Builder,
    grad: Value,
    indices: Value,
    num_weights: int | sympy.Expr,
    padding_idx: int | sympy.Expr,
    scale_grad_by_freq: bool,
) -> Value:
    """For each row of the weight Σ of the gradients at its lookups; 0 for the row of the padding.

    As in eager, a position out of range (which forward refuses) has no gradient.
    """
    if scale_grad_by_freq:
        raise Unsupported("gradients divided by how often a row was looked up")
    count, width = sympy.Mul(*indices.shape), grad.shape[-1]
    rows, flat = reshape(grad, (count, width)), reshape(indices, (count,))
    named = convert(flat, torch.int64).view((count, width), [axis_symbol(0)])
    zeros = Value((sympy.sympify(num_weights), width), grad.dtype, grad.device, literal(0, grad.dtype))
    if not is_compared(zeros, 0, named):
        counted = None if padding_idx == -1 else ~eq(Term(named.expr), padding_idx)
        return folded(ctx, "sum", zeros, along(0, named), rows, counted)
    if padding_idx != -1:
        rows = combine(lambda at, row: where(eq(at, padding_idx), 0, row), named, rows)
    return summed(ctx, zeros, 0, convert(flat, torch.int64), rows)


@lowers(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_by(ctx: Builder, x: Value, dim: int, index: Value, src: Argument, *, reduce: str) -> Value:
    """x with `src`, or one number, added to or multiplied into the elements at `index`."""
    if x.dtype is torch.bool or reduce not in ("add", "multiply"):
        raise Unsupported(f"{reduce} of {x.dtype} that is scattered")
    source = (
        src
        if isinstance(src, Value)
        else Value(index.shape, x.dtype, x.device, term_of(src, index.shape, x.dtype).expr)
    )
    return scatter_reduce(ctx, x, dim, index, source, "sum" if reduce == "add" else "prod")


SCATTER_FOLDS: dict[str, JoinName] = {"sum": "sum", "prod": "prod", "mean": "sum", "amax": "max", "amin": "min"}


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    ctx: Builder, x: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """x with the sources that name each element folded into it, or replacing it."""
    return _reduced(ctx, x, dim, index, src, reduce, include_self, Wording.ELEMENT)


def _reduced(
    ctx: Builder, x: Value, dim: int, index: Value, src: Value, reduce: str, include_self: bool, wording: Wording
) -> Value:
    """The same, refused with this wording where an index is out of range."""
    if (reduce == "mean" and not x.dtype.is_floating_point) or x.dtype is torch.bool:
        raise Unsupported(f"{reduce} of {x.dtype} that are scattered")
    index = named_along(x, dim, index, wording)
    if not is_compared(x, dim, index):
        index_of_source, source = along(dim, index), sources_at(src, index)
        return folded(
            ctx, SCATTER_FOLDS[reduce], x, index_of_source, source, include_self=include_self, mean=reduce == "mean"
        )
    named, source = sources_of_each(x, dim, index, src)
    one, op, compute = is_one(x, dim, index), SCATTER_FOLDS[reduce], widened(x.dtype)
    nothing = literal(identity(op, compute), compute)
    parts = combine(lambda h, new: where(h, new.to(compute), Term(nothing)), named, source)
    hits = named if one else folded_sources(ctx, "any", named, x)
    folded_parts = parts if one else folded_sources(ctx, op, parts, x)
    old = convert(x, compute)
    total = (
        combine(JOINS[op], folded_parts, old) if include_self else folded_parts
    )  # of 0.0 and -0.0 eager keeps the old one
    if reduce == "mean":
        counts = combine(lambda h: h.to(torch.int64), named)
        number = counts if one else folded_sources(ctx, "sum", counts, x)
        extra = 1 if include_self else 0
        total = combine(lambda t, n: t / maximum(n + extra, 1).to(compute), total, number)
    return combine(lambda h, new, was: where(h, new, was).to(x.dtype, implicit=True), hits, total, old)


@lowers(aten.index_reduce.default)
def index_reduce(
    ctx: Builder, x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """Apply `scatter_reduce` to slices along `dim`."""
    if x.rank == 0:
        parts, whole = reshape(source, (sympy.Mul(*source.shape),)), reshape(x, (ONE,))
        return reshape(index_reduce(ctx, whole, 0, index, parts, reduce, include_self=include_self), ())
    rows = laid_flat(index).view(source.shape, [axis_symbol(dim % x.rank)])
    return _reduced(ctx, x, dim, rows, source, reduce, include_self, Wording.ROW)


def _added(ctx: Builder, x: Value, named: Value, source: Value, *, one: bool) -> Value:
    compute = widened(x.dtype) if x.dtype.is_floating_point else x.dtype
    parts = combine(lambda h, new: where(h, new.to(compute), 0), named, source)
    total = parts if one else folded_sources(ctx, "sum", parts, x)
    return combine(lambda old, new: (old.to(compute) + new).to(x.dtype, implicit=True), x, total)
