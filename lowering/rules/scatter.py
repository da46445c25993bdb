"""Writes to places held in a tensor.

Where few comparisons tell, each element looks for the sources that name it, so that nothing is written twice: where one
place per row is written, an element sees by itself whether it is the one; else sources that meet are folded, the last
one wins or they are added up.  Where that would take many comparisons, each source finds its place (`meeting`).
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from lowering.builder import Builder
from lowering.errors import Unsupported
from lowering.expr import Expr, Index, IndexValue, make_cast
from lowering.indexing import ONE, ZERO, axis_symbol
from lowering.registry import lowers
from lowering.rules.assembly import placed
from lowering.rules.formula import Term, eq, literal, maximum, minimum, where
from lowering.rules.gather import indexed, position
from lowering.rules.masked import numbered_sources
from lowering.rules.meeting import folded, updates_input, written
from lowering.rules.promotion import Argument, combine, convert, term_of, widened
from lowering.rules.runs import summed_in_runs
from lowering.scalar_ops import identity
from lowering.value import Shape, Value, axes_of, broadcast_to, reshape

aten = torch.ops.aten

MOST = 1 << 20
"""Comparisons of a place with a source that a call may cost."""

FEW = 32
"""Sources that each element of a tensor of any size may be compared with."""


def _is_few(work: sympy.Expr) -> bool:
    """Is this a known number of comparisons that a call may cost?"""
    return bool(work.is_Integer and work <= MOST)


def last_source(ctx: Builder, index: Value, size: sympy.Expr) -> Value:
    """For each of `size` places the last element of the 1-d `index` of positions that names it, -1 where none does."""
    if index.shape[0] == 0:
        return Value((size,), torch.int64, index.device, literal(-1, torch.int64))
    places = (size, index.shape[0])
    source = Term(IndexValue(axis_symbol(1)))
    hit = eq(Term(index.view(places, [axis_symbol(1)]).expr), Term(IndexValue(axis_symbol(0))))
    chosen = Value(places, torch.int64, index.device, where(hit, source, -1).expr)
    return ctx.reduce("max", [chosen], [1])


def _flat(index: Value) -> Value:
    return reshape(index, (sympy.Mul(*index.shape),))


@lowers(aten.index_copy.default)
def index_copy(ctx: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    """x with slices along `dim` replaced by those of `source`."""
    if x.rank == 0:
        return reshape(index_copy(ctx, reshape(x, (ONE,)), 0, index, reshape(source, (ONE,))), ())
    dim %= x.rank
    if source.rank == 0:
        source = reshape(source, (ONE,) * x.rank)
    return _copied(ctx, x, dim, _positions(_flat(index), x.shape[dim], dim, wrap=False), source)


def _copied(ctx: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    """The same at positions that are settled."""
    if updates_input(ctx) or not _is_few(source.shape[dim] * x.shape[dim]):
        return written(ctx, x, _rows(index, dim, source.shape), source)
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
    at = _positions(_flat(index), x.shape[dim], dim, wrap=True)
    if updates_input(ctx) or not _is_few(count * x.shape[dim]):
        shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
        filling = Value(shape, x.dtype, x.device, term_of(filler, shape, x.dtype).expr)
        return written(ctx, x, _rows(at, dim, shape), filling)
    last = last_source(ctx, at, x.shape[dim])
    named = Term(last.view(x.shape, [axis_symbol(dim)]).expr) >= 0
    return Value(x.shape, x.dtype, x.device, where(named, term_of(filler, x.shape, x.dtype), Term(x.expr)).expr)


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    ctx: Builder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    """x[indices] = values, or += with `accumulate`; of masks those with one number."""
    given = [(k, index) for k, index in enumerate(indices) if index is not None]
    if len(given) == 1 and given[0][1].dtype in (torch.bool, torch.uint8):
        return _under_mask(ctx, x, given[0][0], given[0][1], values, accumulate)
    if not given:
        raise Unsupported("no index")
    if accumulate and not updates_input(ctx):
        shape, place = indexed(x.shape, indices, check=False)  # those of runs are known to be in range
        source = convert(broadcast_to(_aligned(values, shape), shape), x.dtype)
        if (in_runs := summed_in_runs(ctx, x, place, source)) is not None:
            return in_runs
    dim, index = given[0]
    compared = sympy.Mul(*index.shape) * (sympy.Mul(*x.shape) if accumulate else x.shape[dim])
    exact = not accumulate or x.dtype.itemsize >= 4  # else it is summed up in another tensor
    if len(given) > 1 or (exact and updates_input(ctx)) or not _is_few(compared):
        shape, place = indexed(x.shape, indices, check=_is_checked(ctx))
        source = convert(broadcast_to(_aligned(values, shape), shape), x.dtype)
        return folded(ctx, "sum", x, place, source) if accumulate else written(ctx, x, place, source)
    # the source's dimensions: those before `dim`, those of the index, those after
    shape = (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
    source = broadcast_to(_aligned(values, shape), shape)
    flat = reshape(source, (*x.shape[:dim], sympy.Mul(*index.shape), *x.shape[dim + 1 :]))
    at = _flat(_positions(index, x.shape[dim], dim, wrap=True, check=_is_checked(ctx)))
    return _summed(ctx, x, dim, at, flat) if accumulate else _copied(ctx, x, dim, at, flat)


def _is_checked(ctx: Builder) -> bool:
    """Does the current call look whether positions are in range?"""
    assert ctx.current is not None
    return ctx.current.target is not aten._unsafe_index_put.default


@lowers(aten.put.default)
def put(ctx: Builder, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    """x laid flat with `source` written, or added, at the positions that `index` holds."""
    total = sympy.Mul(*x.shape)
    flat, at, new = reshape(x, (total,)), _positions(_flat(index), total, 0, wrap=True), _flat(source)
    result = _summed(ctx, flat, 0, at, new) if accumulate else _copied(ctx, flat, 0, at, new)
    return reshape(result, x.shape)


def _positions(index: Value, size: sympy.Expr, dim: int, *, wrap: bool, check: bool = True) -> Value:
    """What `position` makes of an index, as a tensor."""
    named = position(index, size, dim, wrap=wrap, check=check)
    expr = named if isinstance(named, Expr) else IndexValue(named)
    return Value(index.shape, torch.int64, index.device, expr)


def _aligned(values: Value, shape: Shape) -> Value:
    """`values` without leading dimensions of size 1 that `shape` does not have."""
    extra = values.rank - len(shape)
    if extra <= 0:
        return values
    index = [ZERO] * extra + [axis_symbol(k) for k in range(len(shape))]
    return values.view(values.shape[extra:], index)


def _under_mask(ctx: Builder, x: Value, first: int, mask: Value, values: Value, accumulate: bool) -> Value:
    """One number, or one after the other, written or added wherever a mask over some adjacent dimensions holds."""
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


# Along one dimension, each row by itself ----------------------------------------------------------------------------


@lowers(aten.scatter.value)
def scatter_value(ctx: Builder, x: Value, dim: int, index: Value, value: Argument) -> Value:
    """x with `value` written at `index`."""
    index = _named(x, dim, index)
    if not _is_compared(x, dim, index):
        source = Value(index.shape, x.dtype, x.device, term_of(value, index.shape, x.dtype).expr)
        return written(ctx, x, _along(x, dim, index), source)
    named, _ = _sources(ctx, x, dim, index, None)
    hit = named if _is_one(x, dim, index) else _folded(ctx, "any", named, x)
    return combine(lambda h, old: where(h, term_of(value, x.shape, x.dtype), old), hit, x)


@lowers(aten.scatter.src)
def scatter_src(ctx: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    """x with `src` written at `index`; of sources that meet one stays."""
    return _written(ctx, x, dim, _named(x, dim, index), src)


def _written(ctx: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    """The same at positions that are settled."""
    if not _is_compared(x, dim, index):
        return written(ctx, x, _along(x, dim, index), _sources_of(src, index))
    named, source = _sources(ctx, x, dim, index, src)
    if _is_one(x, dim, index):
        return combine(lambda h, new, old: where(h, new, old), named, source, x)
    order = combine(lambda h: where(h, Term(IndexValue(axis_symbol(x.rank))), -1), named)
    last = _folded(ctx, "max", order, x)
    dim %= x.rank
    place: list[Index] = list(axes_of(x.shape))
    place[dim] = last.expr
    hit = Term(last.expr) >= 0
    read = placed(src, x.shape, place, hit)
    return Value(x.shape, x.dtype, x.device, where(hit, read, Term(x.expr)).expr)


@lowers(aten.scatter_add.default)
def scatter_add(ctx: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    """x with `src` added at `index`."""
    return _added_along(ctx, x, dim, _named(x, dim, index), src)


def _added_along(ctx: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    """The same at positions that are settled."""
    if not _is_compared(x, dim, index):
        return folded(ctx, "sum", x, _along(x, dim, index), _sources_of(src, index))
    return _added(ctx, x, *_sources(ctx, x, dim, index, src), one=_is_one(x, dim, index))


@lowers(aten.index_add.default)
def index_add(ctx: Builder, x: Value, dim: int, index: Value, source: Value, *, alpha: Argument = 1) -> Value:
    """x with alpha times the slices of `source` added at the places along `dim` that the 1-d `index` holds."""
    if x.rank == 0:
        source, whole = reshape(source, (sympy.Mul(*source.shape),)), reshape(x, (ONE,))
        return reshape(index_add(ctx, whole, 0, _flat(index), source, alpha=alpha), ())
    dim %= x.rank
    scaled = source if alpha == 1 else combine(lambda a: a * term_of(alpha, source.shape, source.dtype), source)
    return _summed(ctx, x, dim, _positions(_flat(index), x.shape[dim], dim, wrap=False), scaled)


def _summed(ctx: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    """x with the slices of `source` added at positions that are settled."""
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
    """For each row of the weight Σ of the gradients of where it was looked up; none for the row of the padding.

    As in eager, a position that is not one of a row (which forward refuses) has no gradient.
    """
    if scale_grad_by_freq:
        raise Unsupported("gradients divided by how often a row was looked up")
    count, width = sympy.Mul(*indices.shape), grad.shape[-1]
    rows, flat = reshape(grad, (count, width)), reshape(indices, (count,))
    named = convert(flat, torch.int64).view((count, width), [axis_symbol(0)])
    zeros = Value((sympy.sympify(num_weights), width), grad.dtype, grad.device, literal(0, grad.dtype))
    if not _is_compared(zeros, 0, named):
        counted = None if padding_idx == -1 else ~eq(Term(named.expr), padding_idx)
        return folded(ctx, "sum", zeros, _along(zeros, 0, named), rows, counted)
    rows = combine(lambda at, row: where(eq(at, padding_idx), 0, row), named, rows)
    return _summed(ctx, zeros, 0, convert(flat, torch.int64), rows)


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


FOLDS = {"sum": "sum", "prod": "prod", "mean": "sum", "amax": "max", "amin": "min"}


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    ctx: Builder, x: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """x with the sources that name each element folded into it, or put in its place."""
    if (reduce == "mean" and not x.dtype.is_floating_point) or x.dtype is torch.bool:
        raise Unsupported(f"{reduce} of {x.dtype} that are scattered")
    index = _named(x, dim, index)
    if not _is_compared(x, dim, index):
        place, source = _along(x, dim, index), _sources_of(src, index)
        return folded(ctx, FOLDS[reduce], x, place, source, include_self=include_self, mean=reduce == "mean")
    named, source = _sources(ctx, x, dim, index, src)
    one, op, compute = _is_one(x, dim, index), FOLDS[reduce], widened(x.dtype)
    nothing = literal(identity(op, compute), compute)
    parts = combine(lambda h, new: where(h, new.to(compute), Term(nothing)), named, source)
    hits = named if one else _folded(ctx, "any", named, x)
    joined = parts if one else _folded(ctx, op, parts, x)
    join = {"sum": Term.__add__, "prod": Term.__mul__, "max": maximum, "min": minimum}[op]
    old = convert(x, compute)
    total = combine(join, old, joined) if include_self else joined
    if reduce == "mean":
        counts = combine(lambda h: h.to(torch.int64), named)
        number = counts if one else _folded(ctx, "sum", counts, x)
        extra = 1 if include_self else 0
        total = combine(lambda t, n: t / maximum(n + extra, 1).to(compute), total, number)
    return combine(lambda h, new, was: where(h, new, was).to(x.dtype, implicit=True), hits, total, old)


@lowers(aten.index_reduce.default)
def index_reduce(
    ctx: Builder, x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """The same with slices along `dim`."""
    if x.rank == 0:
        parts, whole = reshape(source, (sympy.Mul(*source.shape),)), reshape(x, (ONE,))
        return reshape(index_reduce(ctx, whole, 0, index, parts, reduce, include_self=include_self), ())
    rows = _flat(index).view(source.shape, [axis_symbol(dim % x.rank)])
    return scatter_reduce(ctx, x, dim, rows, source, reduce, include_self=include_self)


def _added(ctx: Builder, x: Value, named: Value, source: Value, *, one: bool) -> Value:
    compute = widened(x.dtype) if x.dtype.is_floating_point else x.dtype
    parts = combine(lambda h, new: where(h, new.to(compute), 0), named, source)
    total = parts if one else _folded(ctx, "sum", parts, x)
    return combine(lambda old, new: (old.to(compute) + new).to(x.dtype, implicit=True), x, total)


def _is_compared(x: Value, dim: int, index: Value) -> bool:
    """Does each element of x look for its sources?

    Raises:
        Unsupported: the index has another rank.
    """
    if _is_one(x, dim, index):
        return True
    if index.rank != x.rank:
        raise Unsupported("a scatter by a number")
    count = index.shape[dim]
    return bool(count.is_Integer and count <= FEW) or _is_few(sympy.Mul(*x.shape) * count)


def _along(x: Value, dim: int, index: Value) -> list[Index]:
    """The places in x of sources in the shape of `index`, which holds where each is along `dim`."""
    place: list[Index] = list(axes_of(index.shape))
    place[dim] = _as_index(index)
    return place


def _named(x: Value, dim: int, index: Value) -> Value:
    """The positions along `dim` that an index for each source holds; x without dimensions has the one position 0."""
    size = x.shape[dim] if x.rank else ONE
    return _positions(convert(index, torch.int64), size, dim % max(x.rank, 1), wrap=False)


def _as_index(index: Value) -> Index:
    """A tensor of positions as an index: affine where it is."""
    return index.expr.index if isinstance(index.expr, IndexValue) else index.expr


def _rows(index: Value, dim: int, shape: Shape) -> list[Index]:
    """The places of sources of this shape whose slices along `dim` are named by the 1-d `index`."""
    place: list[Index] = list(axes_of(shape))
    place[dim] = _as_index(index.view(shape, [axis_symbol(dim)]))
    return place


def _sources_of(src: Value, index: Value) -> Value:
    """The part of the sources that `index` has places for."""
    return src if src.shape == index.shape else src.view(index.shape, axes_of(index.shape))


def _is_one(x: Value, dim: int, index: Value) -> bool:
    """Is at most one place per row written?"""
    if x.rank == 0 or 0 in index.shape:
        return True
    dim %= x.rank
    return index.shape == (*x.shape[:dim], ONE, *x.shape[dim + 1 :])


def _sources(ctx: Builder, x: Value, dim: int, index: Value, src: Value | None) -> tuple[Value, Value]:
    """(whether a source names an element of x, the source), each over the axes of x and, behind them, of the sources.

    One source per row has no axis.  The second is the first again where no sources are given.
    """
    if 0 in index.shape:
        never = Value(x.shape, torch.bool, x.device, literal(False, torch.bool))
        return never, never if src is None else Value(x.shape, src.dtype, x.device, literal(0, src.dtype))
    if x.rank == 0:
        always = Value((), torch.bool, x.device, eq(Term(reshape(index, ()).expr), 0).expr)
        return always, always if src is None else reshape(src, ())
    dim %= x.rank
    one = _is_one(x, dim, index)
    count = index.shape[dim]
    shape = x.shape if one else (*x.shape, count)
    place: list[sympy.Expr] = list(axes_of(x.shape))
    place[dim] = ZERO if one else axis_symbol(x.rank)
    inside: Term | None = None
    for k, (size, own) in enumerate(zip(index.shape, x.shape, strict=True)):
        if k != dim and size != own:  # rows behind the last one of `index` are left out
            test = Term(IndexValue(axis_symbol(k))) < size
            inside = test if inside is None else inside & test
    at = placed(index, shape, place, inside)
    hit = eq(at, Term(IndexValue(axis_symbol(dim))))
    hit = hit if inside is None else hit & inside
    named = Value(shape, torch.bool, x.device, hit.expr)
    if src is None:
        return named, named
    return named, Value(shape, src.dtype, x.device, placed(src, shape, place, hit if inside is not None else None).expr)


def _folded(ctx: Builder, op: str, value: Value, x: Value) -> Value:
    if value.shape[-1] == 0:
        return Value(x.shape, value.dtype, x.device, literal(identity(op, value.dtype), value.dtype))
    return ctx.reduce(op, [value], [x.rank])
