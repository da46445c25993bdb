"""Lowers tensors assembled from parts: concatenation, padding, triangles, writing into a slice, gradients of views.

Each element selects its part; a part is loaded only where it is selected (`Load.mask`), because its index is invalid
elsewhere.  A concatenation of very many parts is refused: every element would compare with each bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch import fx

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, ZERO, FloorDiv, Mod, axis_symbol, simplify
from fusion.lowering.ir.expr import Expr, Index, IndexValue, guarded
from fusion.lowering.ir.sizes import sizes_of
from fusion.lowering.registry import lowers
from fusion.lowering.rules.collisions import updates_input, written
from fusion.lowering.rules.formula import Term, both, eq, literal, where
from fusion.lowering.rules.promotion import Argument, convert, shaped_as
from fusion.lowering.rules.view import digits, is_dense, position_in, slice_start, unsqueeze
from fusion.lowering.value import Shape, Value, axes_of, axis_bounds

aten = torch.ops.aten

MAX_PARTS = 16


def placed(part: Value, shape: Shape, index: Sequence[Index], mask: Term | None) -> Term:
    """The element of `part` at `index` (over the axes of `shape`), read only where `mask` holds and 0 elsewhere."""
    read = part.view(shape, index).expr
    return Term(read if mask is None else guarded(read, mask.expr))


def choose(mask: Term | None, inside: Term, outside: Term) -> Term:
    """`inside` (built by `placed` under `mask`) where `mask` holds, else `outside`."""
    if mask is None or outside.expr is literal(0, outside.dtype):
        return inside
    return where(mask, inside, outside)


def within(position: sympy.Expr, low: sympy.Expr | None, high: sympy.Expr | None) -> Term | None:
    """`low ≤ position < high` as a mask; a bound that is None always holds."""
    at = Term(IndexValue(position))
    tests = [] if low is None else [at >= low]
    tests += [] if high is None else [at < high]
    return _all(tests)


def _all(tests: Sequence[Term]) -> Term | None:
    combined: Term | None = None
    for test in tests:
        combined = both(combined, test)
    return combined


def _along(shape: Shape, dim: int, position: sympy.Expr) -> list[sympy.Expr]:
    index: list[sympy.Expr] = list(axes_of(shape))
    index[dim] = position
    return index


# Concatenation ------------------------------------------------------------------------------------------------------


@lowers(aten.cat.default)
def cat(ctx: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """The tensors concatenated along `dim`; 1-d empty ones are ignored."""
    dtype = ctx.current.meta["val"].dtype
    counted = [part for part in tensors if part.shape != (ZERO,)] or tensors[:1]
    parts = [convert(part, dtype) for part in counted]
    if len(parts) > MAX_PARTS:
        raise Unsupported(f"concatenation of {len(parts)} tensors")
    dim %= parts[0].rank
    ends: list[sympy.Expr] = [ZERO]
    for part in parts:
        ends.append(ends[-1] + part.shape[dim])
    shape = (*parts[0].shape[:dim], ends[-1], *parts[0].shape[dim + 1 :])
    axis = axis_symbol(dim)
    result: Term | None = None
    for k in reversed(range(len(parts))):
        low, high = (ends[k] if k else None), (ends[k + 1] if k < len(parts) - 1 else None)
        read = placed(parts[k], shape, _along(shape, dim, axis - ends[k]), within(axis, low, high))
        if result is None:
            result = read
        else:
            test = within(axis, None, high)
            assert test is not None
            result = where(test, read, result)
    assert result is not None
    return Value(shape, dtype, parts[0].device, result.expr)


@lowers(aten.stack.default)
def stack(ctx: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """The tensors concatenated along a new dimension."""
    return cat(ctx, [unsqueeze(ctx, part, dim) for part in tensors], dim % (tensors[0].rank + 1))


@lowers(aten.constant_pad_nd.default)
def constant_pad(ctx: Builder, x: Value, pad: Sequence[int | sympy.Expr], value: Argument = 0) -> Value:
    """x with `pad` elements (before, after; last dimension first) of a value around it; negative counts crop."""
    shape: list[sympy.Expr] = list(x.shape)
    index: list[sympy.Expr] = list(axes_of(x.shape))
    tests: list[Term] = []
    for position in range(len(pad) // 2):
        k = x.rank - 1 - position
        before, after = sympy.sympify(pad[2 * position]), sympy.sympify(pad[2 * position + 1])
        shape[k] = x.shape[k] + before + after
        index[k] = axis_symbol(k) - before
        low = None if before.is_nonpositive else before
        high = None if after.is_nonpositive else before + x.shape[k]
        test = within(axis_symbol(k), low, high)
        tests += [] if test is None else [test]
    mask = _all(tests)
    assert not isinstance(value, Value)
    filler = Term(literal(value, x.dtype))
    result = tuple(shape)
    return Value(result, x.dtype, x.device, choose(mask, placed(x, result, index, mask), filler).expr)


# Triangles ----------------------------------------------------------------------------------------------------------


@lowers(aten.tril.default)
def tril(ctx: Builder, x: Value, diagonal: int | sympy.Expr = 0) -> Value:
    """x on and below a diagonal, 0 above it."""
    return _triangle(x, Term(_column_less_row(x)) <= diagonal)


@lowers(aten.triu.default)
def triu(ctx: Builder, x: Value, diagonal: int | sympy.Expr = 0) -> Value:
    """x on and above a diagonal, 0 below it."""
    return _triangle(x, Term(_column_less_row(x)) >= diagonal)


def _column_less_row(x: Value) -> Expr:
    return IndexValue(axis_symbol(x.rank - 1) - axis_symbol(x.rank - 2))


def _triangle(x: Value, mask: Term) -> Value:
    return shaped_as(x, choose(mask, placed(x, x.shape, axes_of(x.shape), mask), Term(literal(0, x.dtype))))


# Writing into a part of another tensor ------------------------------------------------------------------------------


@lowers(aten.slice_scatter.default)
def slice_scatter(
    ctx: Builder,
    x: Value,
    src: Value,
    dim: int = 0,
    start: int | sympy.Expr | None = None,
    end: int | sympy.Expr | None = None,
    step: int = 1,
) -> Value:
    """x with a slice replaced by `src`."""
    dim %= x.rank
    low = slice_start(x.shape[dim], start, end, step, src.shape[dim])
    if updates_input(ctx):
        return written(ctx, x, _along(src.shape, dim, low + axis_symbol(dim) * step), convert(src, x.dtype))
    return _into_slice(Term(x.expr), x.shape, convert(src, x.dtype), dim, low, sympy.sympify(step))


@lowers(aten.slice_backward.default)
def slice_backward(
    ctx: Builder,
    grad: Value,
    input_sizes: Sequence[int | sympy.Expr],
    dim: int,
    start: int | sympy.Expr,
    end: int | sympy.Expr,
    step: int,
) -> Value:
    """The gradient of a slice: 0 outside it."""
    shape = tuple(map(sympy.sympify, input_sizes))
    dim %= len(shape)
    low = slice_start(shape[dim], start, end, step, grad.shape[dim])
    return _into_slice(Term(literal(0, grad.dtype)), shape, grad, dim, low, sympy.sympify(step))


def _into_slice(outside_value: Term, shape: Shape, src: Value, dim: int, low: sympy.Expr, step: sympy.Expr) -> Value:
    axis, length = axis_symbol(dim), src.shape[dim]
    if length == 0:
        return Value(shape, src.dtype, src.device, outside_value.expr)
    reaches_end = step == 1 and low + length == shape[dim]
    mask = within(axis, None if low == 0 else low, None if reaches_end else low + (length - 1) * step + 1)
    offset = axis - low
    if step != 1:
        on_step = eq(Term(IndexValue(Mod(offset, step))), 0)
        mask = both(mask, on_step)
        offset = simplify(FloorDiv(offset, step), axis_bounds(shape))
    inside = placed(src, shape, _along(shape, dim, offset), mask)
    return Value(shape, src.dtype, src.device, choose(mask, inside, outside_value).expr)


@lowers(aten.select_scatter.default)
def select_scatter(ctx: Builder, x: Value, src: Value, dim: int, index: int | sympy.Expr) -> Value:
    """x with one position of `dim` replaced by `src`."""
    dim %= x.rank
    at, slices = position_in(x.shape[dim], index), unsqueeze(ctx, convert(src, x.dtype), dim)
    if at.is_negative or (at - x.shape[dim]).is_nonnegative:
        raise Unsupported(f"position {index} of {x.shape[dim]}")
    if updates_input(ctx):
        return written(ctx, x, _along(slices.shape, dim, at), slices)
    return _into_slice(Term(x.expr), x.shape, slices, dim, at, ONE)


@lowers(aten.select_backward.default)
def select_backward(
    ctx: Builder, grad: Value, input_sizes: Sequence[int | sympy.Expr], dim: int, index: int | sympy.Expr
) -> Value:
    """The gradient of a selection: 0 at other positions."""
    shape = tuple(map(sympy.sympify, input_sizes))
    dim %= len(shape)
    at = position_in(shape[dim], index)
    return _into_slice(Term(literal(0, grad.dtype)), shape, unsqueeze(ctx, grad, dim), dim, at, ONE)


@lowers(aten.diagonal_scatter.default)
def diagonal_scatter(ctx: Builder, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """x with a diagonal replaced by `src`, whose last dimension runs along it."""
    return _onto_diagonal(Term(x.expr), x.shape, convert(src, x.dtype), offset, dim1, dim2)


@lowers(aten.diagonal_backward.default)
def diagonal_backward(
    ctx: Builder, grad: Value, input_sizes: Sequence[int | sympy.Expr], offset: int, dim1: int, dim2: int
) -> Value:
    """The gradient of a diagonal: 0 off it."""
    shape = tuple(map(sympy.sympify, input_sizes))
    return _onto_diagonal(Term(literal(0, grad.dtype)), shape, grad, offset, dim1, dim2)


def _onto_diagonal(outside_value: Term, shape: Shape, src: Value, offset: int, dim1: int, dim2: int) -> Value:
    row, column = axis_symbol(dim1 % len(shape)), axis_symbol(dim2 % len(shape))
    mask = eq(Term(IndexValue(column - row)), offset)
    others = [s for s in axes_of(shape) if s not in (row, column)]
    along = row if offset >= 0 else column
    inside = placed(src, shape, [*others, along], mask)
    return Value(shape, src.dtype, src.device, choose(mask, inside, outside_value).expr)


@lowers(aten.as_strided_scatter.default)
def as_strided_scatter(
    ctx: Builder,
    x: Value,
    src: Value,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Value:
    """x, dense in memory, with the positions there that `size` and `stride` select replaced by `src`."""
    source = ctx.current.args[0]
    assert isinstance(source, fx.Node)
    memory = source.meta["val"]
    strides, steps = sizes_of(memory.stride()), tuple(map(sympy.sympify, stride))
    offset = sympy.sympify(0 if storage_offset is None else storage_offset - memory.storage_offset())
    last = sympy.Add(offset, *((n - 1) * s for n, s in zip(src.shape, steps, strict=True)))
    if not is_dense(x.shape, strides) or 0 in x.shape or not 0 <= offset <= last < sympy.Mul(*x.shape):
        raise Unsupported("writing into memory with gaps, or beyond the elements of the input")
    new = convert(src, x.dtype)
    if offset == 0 and sympy.Mul(*src.shape) == sympy.Mul(*x.shape) and is_dense(src.shape, steps):
        position = sympy.Add(*(s * i for s, i in zip(strides, axes_of(x.shape), strict=True)))
        return new.view(x.shape, digits(position, src.shape, steps, x.shape))
    position = sympy.Add(offset, *(s * i for s, i in zip(steps, axes_of(src.shape), strict=True)))
    return written(ctx, x, digits(position, x.shape, strides, src.shape), new)
