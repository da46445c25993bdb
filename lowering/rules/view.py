"""Lowers views: never to nodes, but to another index of the load that reads through them.

The `_copy` forms of views are here too, because a graph of pure functions cannot tell them apart.  A view as another
dtype, and an `as_strided` that is not provably a change of index, stay externs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import sympy
import torch
from torch import fx

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, ZERO, FloorDiv, Mod, axis_symbol, simplify
from fusion.lowering.ir.sizes import sizes_of
from fusion.lowering.registry import lowers
from fusion.lowering.value import Shape, Value, axes_of, axis_bounds, broadcast_to, contiguous_strides, reshape

aten, prims = torch.ops.aten, torch.ops.prims


# Shapes -------------------------------------------------------------------------------------------------------------


@lowers(
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default),
    *(aten._reshape_alias.default, aten._reshape_copy.default),
    lazy=True,
)
def view(ctx: Builder, x: Value, shape: Sequence[int | sympy.Expr], strides: object = None) -> Value:
    """The same elements in row-major order under `shape`, in which one size may be -1."""
    sizes = [sympy.sympify(size) for size in shape]
    if -1 in sizes:
        known = sympy.Mul(*(size for size in sizes if size != -1))
        if known == 0:
            raise Unsupported("a size of an empty view that is left open")
        sizes = [FloorDiv(sympy.Mul(*x.shape), known) if size == -1 else size for size in sizes]
    return reshape(x, tuple(sizes))


@lowers(aten.expand.default, aten.expand_copy.default, lazy=True)
def expand(ctx: Builder, x: Value, shape: Sequence[int | sympy.Expr], *, implicit: bool = False) -> Value:
    """x broadcast to `shape`, where -1 keeps a dimension."""
    skip = len(shape) - x.rank
    sizes = tuple(x.shape[k - skip] if size == -1 else sympy.sympify(size) for k, size in enumerate(shape))
    return broadcast_to(x, sizes)


@lowers(aten.unsqueeze.default, aten.unsqueeze_copy.default, lazy=True)
def unsqueeze(ctx: Builder, x: Value, dim: int) -> Value:
    """x with a dimension of size 1 at `dim`."""
    at = dim % (x.rank + 1)
    index = [axis_symbol(k if k < at else k + 1) for k in range(x.rank)]
    return x.view((*x.shape[:at], ONE, *x.shape[at:]), index)


@lowers(aten.squeeze.default, aten.squeeze_copy.default, lazy=True)
def squeeze(ctx: Builder, x: Value) -> Value:
    """x without its dimensions of size 1."""
    return _without(x, range(x.rank))


@lowers(aten.squeeze.dim, aten.squeeze_copy.dim, lazy=True)
def squeeze_dim(ctx: Builder, x: Value, dim: int) -> Value:
    """x without dimension `dim` if that has size 1."""
    return _without(x, [dim])


@lowers(aten.squeeze.dims, aten.squeeze_copy.dims, lazy=True)
def squeeze_dims(ctx: Builder, x: Value, dims: Sequence[int]) -> Value:
    """x without those of `dims` that have size 1."""
    return _without(x, dims)


def _without(x: Value, dims: Sequence[int]) -> Value:
    gone = {d % x.rank for d in dims if x.rank and x.shape[d] == 1}
    kept = [k for k in range(x.rank) if k not in gone]
    index = [ZERO if k in gone else axis_symbol(kept.index(k)) for k in range(x.rank)]
    return x.view(tuple(x.shape[k] for k in kept), index)


# Orders -------------------------------------------------------------------------------------------------------------


@lowers(aten.permute.default, aten.permute_copy.default, prims.transpose.default, lazy=True)
def permute(ctx: Builder, x: Value, dims: Sequence[int]) -> Value:
    """Dimension k of the result is dimension dims[k] of x."""
    order = [d % x.rank for d in dims]
    index: list[sympy.Expr] = [ZERO] * x.rank
    for k, d in enumerate(order):
        index[d] = axis_symbol(k)
    return x.view(tuple(x.shape[d] for d in order), index)


@lowers(aten.transpose.int, aten.transpose_copy.int, lazy=True)
def transpose(ctx: Builder, x: Value, dim0: int, dim1: int) -> Value:
    """x with two dimensions exchanged."""
    order = list(range(x.rank))
    if x.rank:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(ctx, x, order)


@lowers(aten.t.default, aten.t_copy.default, lazy=True)
def t(ctx: Builder, x: Value) -> Value:
    """The transpose of a matrix; a vector is unchanged."""
    return permute(ctx, x, range(x.rank)[::-1])


@lowers(aten.flip.default, prims.rev.default, lazy=True)
def flip(ctx: Builder, x: Value, dims: Sequence[int]) -> Value:
    """x with `dims` running backwards."""
    backwards = {d % x.rank for d in dims} if x.rank else set()
    return x.view(x.shape, [x.shape[k] - 1 - s if k in backwards else s for k, s in enumerate(axes_of(x.shape))])


@lowers(
    *(aten.alias.default, aten.alias_copy.default, aten.detach.default, aten.detach_copy.default),
    *(aten.lift.default, aten.lift_fresh.default, aten.view_as.default, prims.view_of.default),
    lazy=True,
)
def alias(ctx: Builder, x: Value, *like: Value) -> Value:
    """x itself, under the shape of `like` if given."""
    return reshape(x, like[0].shape) if like else x


# Parts --------------------------------------------------------------------------------------------------------------


def slice_start(
    size: sympy.Expr,
    start: int | sympy.Expr | None,
    end: int | sympy.Expr | None,
    step: int | sympy.Expr,
    length: sympy.Expr,
) -> sympy.Expr:
    """Return the start of a slice of a dimension of `size`, given that the result has this `length`.

    Bounds count from the end if negative and are clamped.  With symbolic sizes the length tells which applies.

    Raises:
        Unsupported: no reading of the bounds gives this length, or several do, with different starts.
    """
    if length == 0:
        return ZERO
    step, first = sympy.sympify(step), ZERO if start is None else sympy.sympify(start)
    last = size if end is None or end == sys.maxsize else sympy.sympify(end)
    lows, highs = _readings(first, size), _readings(last, size)
    # A start outside is clamped to 0, an end to the size: otherwise the slice would be empty.
    lows += [ZERO] if ZERO not in lows and not first.is_nonnegative else []
    highs += [size] if size not in highs and not last.is_nonpositive else []
    fitting = [
        low
        for low in lows
        if any(sympy.expand(simplify(FloorDiv(high - low + step - 1, step) - length, {})) == 0 for high in highs)
    ]
    if len(fitting) != 1:
        raise Unsupported(f"cannot place the slice {start}:{end}:{step} in a dimension of size {size}")
    return fitting[0]


def _readings(bound: sympy.Expr, size: sympy.Expr) -> list[sympy.Expr]:
    """Return the positions within a dimension that a bound of a slice may mean."""
    if bound.is_Integer and size.is_Integer:
        start, length = int(bound), int(size)
        return [sympy.Integer(max(0, start + length) if start < 0 else min(start, length))]
    if bound.is_nonnegative:
        return [bound]
    return [bound + size] if bound.is_nonpositive else [bound, bound + size]


def result_shape(ctx: Builder) -> Shape:
    """Return the shape of eager's result of the call being lowered."""
    return sizes_of(ctx.current.meta["val"].shape)


@lowers(aten.slice.Tensor, aten.slice_copy.Tensor, lazy=True)
def slice_of(
    ctx: Builder,
    x: Value,
    dim: int = 0,
    start: int | sympy.Expr | None = None,
    end: int | sympy.Expr | None = None,
    step: int = 1,
) -> Value:
    """Every `step`-th position of dimension `dim` from `start` up to `end`."""
    dim %= x.rank
    length = result_shape(ctx)[dim]
    low = slice_start(x.shape[dim], start, end, step, length)
    return _part(x, dim, low, length, sympy.sympify(step))


def _part(x: Value, dim: int, start: sympy.Expr, length: sympy.Expr, step: sympy.Expr = ONE) -> Value:
    index: list[sympy.Expr] = list(axes_of(x.shape))
    index[dim] = index[dim] * step + start
    return x.view((*x.shape[:dim], length, *x.shape[dim + 1 :]), index)


def position_in(size: sympy.Expr, position: int | sympy.Expr) -> sympy.Expr:
    """Return a position in a dimension, counted from the front.

    Raises:
        Unsupported: the sign of a symbolic position is not known.
    """
    at = sympy.sympify(position)
    if at.is_negative:
        return at + size
    if not at.is_nonnegative:
        raise Unsupported(f"cannot see whether position {at} is negative")
    return at


@lowers(aten.narrow.default, aten.narrow_copy.default, lazy=True)
def narrow(ctx: Builder, x: Value, dim: int, start: int | sympy.Expr, length: int | sympy.Expr) -> Value:
    """`length` positions of dimension `dim` from `start`."""
    return _part(x, dim % x.rank, position_in(x.shape[dim], start), sympy.sympify(length))


@lowers(aten.select.int, aten.select_copy.int, lazy=True)
def select(ctx: Builder, x: Value, dim: int, position: int | sympy.Expr) -> Value:
    """x at one position of dimension `dim`, which disappears."""
    dim %= x.rank
    at = position_in(x.shape[dim], position)
    index = [at if k == dim else axis_symbol(k if k < dim else k - 1) for k in range(x.rank)]
    return x.view((*x.shape[:dim], *x.shape[dim + 1 :]), index)


@lowers(
    *(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default, aten.split_with_sizes_copy.default),
    lazy=True,
)
def split_with_sizes(ctx: Builder, x: Value, sizes: Sequence[int | sympy.Expr], dim: int = 0) -> tuple[Value, ...]:
    """Consecutive parts of dimension `dim`."""
    parts: list[Value] = []
    start: sympy.Expr = ZERO
    for size in map(sympy.sympify, sizes):
        parts.append(_part(x, dim % x.rank, start, size))
        start = start + size
    return tuple(parts)


@lowers(aten.split.Tensor, aten.unsafe_split.Tensor, aten.split_copy.Tensor, lazy=True)
def split(ctx: Builder, x: Value, size: int | sympy.Expr, dim: int = 0) -> tuple[Value, ...]:
    """Consecutive parts of equal size, the last one with the remainder."""
    length, part = x.shape[dim], sympy.sympify(size)
    if not (length.is_Integer and part.is_Integer):
        raise Unsupported(f"a dimension of size {length} split into parts of {part}")
    starts = range(0, int(length), int(part)) if part != 0 else [0]
    return split_with_sizes(ctx, x, [min(int(part), int(length) - start) for start in starts] or [0], dim)


@lowers(aten.unbind.int, aten.unbind_copy.int, lazy=True)
def unbind(ctx: Builder, x: Value, dim: int = 0) -> tuple[Value, ...]:
    """x at each position of dimension `dim`."""
    if not x.shape[dim].is_Integer:
        raise Unsupported(f"a dimension of size {x.shape[dim]} taken apart")
    return tuple(select(ctx, x, dim, k) for k in range(int(x.shape[dim])))


@lowers(aten.diagonal.default, aten.diagonal_copy.default, lazy=True)
def diagonal(ctx: Builder, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """The elements whose positions in dim2 and dim1 differ by `offset`, as a new last dimension."""
    row, column = dim1 % x.rank, dim2 % x.rank
    kept = [k for k in range(x.rank) if k not in (row, column)]
    height, width = x.shape[row] - max(-offset, 0), x.shape[column] - max(offset, 0)
    if height != width and not (height.is_Integer and width.is_Integer):
        raise Unsupported(f"the diagonal of a matrix of {height} by {width}")
    length = height if height == width else sympy.Integer(max(0, min(int(height), int(width))))
    index: list[sympy.Expr] = [ZERO] * x.rank
    for position, k in enumerate(kept):
        index[k] = axis_symbol(position)
    along = axis_symbol(len(kept))
    index[row], index[column] = along + max(-offset, 0), along + max(offset, 0)
    return x.view((*(x.shape[k] for k in kept), length), index)


@lowers(aten.unfold.default, aten.unfold_copy.default, lazy=True)
def unfold(ctx: Builder, x: Value, dim: int, size: int, step: int) -> Value:
    """All windows of `size` along `dim`, `step` apart; the positions in a window become the last dimension."""
    if x.rank == 0:
        return x.view((sympy.Integer(size),), [])
    dim %= x.rank
    count = FloorDiv(x.shape[dim] - size, sympy.Integer(step)) + 1
    index: list[sympy.Expr] = list(axes_of(x.shape))
    index[dim] = index[dim] * step + axis_symbol(x.rank)
    return x.view((*x.shape[:dim], count, *x.shape[dim + 1 :], sympy.Integer(size)), index)


@lowers(aten.repeat.default, lazy=True)
def repeat(ctx: Builder, x: Value, repeats: Sequence[int | sympy.Expr]) -> Value:
    """x tiled; more counts than dimensions add dimensions in front."""
    skip = len(repeats) - x.rank
    counts = [sympy.sympify(count) for count in repeats]
    shape = tuple(count * (x.shape[k - skip] if k >= skip else ONE) for k, count in enumerate(counts))
    index = [
        axis_symbol(skip + k) if counts[skip + k] == 1 else _wrapped(axis_symbol(skip + k), size, shape)
        for k, size in enumerate(x.shape)
    ]
    return x.view(shape, index)


def _wrapped(position: sympy.Expr, size: sympy.Expr, shape: Shape) -> sympy.Expr:
    """Return `position` mod `size`, or 0 for an empty dimension, which is never read."""
    return ZERO if size == 0 else simplify(Mod(position, size), axis_bounds(shape))


@lowers(aten.roll.default, lazy=True)
def roll(ctx: Builder, x: Value, shifts: Sequence[int | sympy.Expr], dims: Sequence[int] = ()) -> Value:
    """x shifted along `dims`, with elements beyond the end reappearing at the front; without dims, x flattened."""
    if not dims:
        flat = reshape(x, (sympy.Mul(*x.shape),))
        return reshape(roll(ctx, flat, shifts, [0]), x.shape)
    index: list[sympy.Expr] = list(axes_of(x.shape))
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        if not (size.is_Integer or size.is_positive):
            raise Unsupported(f"roll along a dimension of size {size}, which may be 0")
        if size != 0:
            index[dim] = Mod(index[dim] + Mod(-sympy.sympify(shift), size), size)
    return x.view(x.shape, [simplify(i, axis_bounds(x.shape)) for i in index])


# Strides ------------------------------------------------------------------------------------------------------------


@lowers(aten.as_strided.default, lazy=True)
def as_strided(
    ctx: Builder,
    x: Value,
    size: Sequence[int | sympy.Expr],
    stride: Sequence[int | sympy.Expr],
    storage_offset: int | sympy.Expr | None = None,
) -> Value:
    """Positions in the memory of x, if x is dense, in any order of dimensions, and contains all of them."""
    source = ctx.current.args[0]
    assert isinstance(source, fx.Node)
    memory = source.meta["val"]
    strides = sizes_of(memory.stride())
    shape, steps = tuple(map(sympy.sympify, size)), tuple(map(sympy.sympify, stride))
    offset = sympy.sympify(0 if storage_offset is None else storage_offset - memory.storage_offset())
    last = sympy.Add(offset, *((n - 1) * s for n, s in zip(shape, steps, strict=True)))
    if not offset.is_Integer or not last.is_Integer or not is_dense(x.shape, strides):
        raise Unsupported("as_strided with symbolic sizes, or of what leaves gaps in memory")
    if 0 in x.shape or 0 in shape or not 0 <= offset <= last < sympy.Mul(*x.shape):
        raise Unsupported("as_strided beyond the elements of its input")
    position = sympy.Add(offset, *(s * i for s, i in zip(steps, axes_of(shape), strict=True)))
    return x.view(shape, digits(position, x.shape, strides, shape))


def is_dense(shape: Shape, strides: Shape) -> bool:
    """Return whether these strides cover memory without gaps, each element once, in some order of the dimensions."""
    if not all(number.is_Integer for number in (*shape, *strides)):
        return False
    order = sorted(range(len(shape)), key=lambda k: (-strides[k], k))
    return tuple(strides[k] for k in order) == contiguous_strides(tuple(shape[k] for k in order))


def digits(position: sympy.Expr, shape: Shape, strides: Shape, over: Shape) -> list[sympy.Expr]:
    """Return the index into a dense tensor of a position in its memory, an expression over the axes of `over`."""
    bounds = axis_bounds(over)
    return [
        simplify(Mod(simplify(FloorDiv(position, s), bounds), n), bounds) for s, n in zip(strides, shape, strict=True)
    ]
