"""Lowers reductions: sums and products, extremes and their positions, norms, variances.

16-bit floats are accumulated in float32 and rounded once; integers and bools are summed as int64, as in eager.
Variances take two passes, never raw moments.  The position of an extreme over several dimensions counts in row-major
order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, ZERO, axis_symbol
from fusion.lowering.ir.expr import IndexValue
from fusion.lowering.ir.scalar_ops import FoldName
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import Term, absolute, call, exp, isinf, literal, log, maximum, ne, sqrt, where
from fusion.lowering.rules.promotion import combine, convert, rounded, widen
from fusion.lowering.value import Value, contiguous_strides

aten = torch.ops.aten


# The common form ----------------------------------------------------------------------------------------------------


def reduced_dims(x: Value, dims: Sequence[int] | int | None) -> list[int]:
    """Return the reduced dimensions, ascending; None or an empty sequence means all."""
    if x.rank == 0:
        return []
    if dims is None or (not isinstance(dims, int) and not dims):
        return list(range(x.rank))
    return sorted({d % x.rank for d in ([dims] if isinstance(dims, int) else dims)})


def fold(ctx: Builder, op: FoldName, args: Sequence[Value], dims: Sequence[int], keepdim: bool = False) -> Value:
    """Apply `ctx.reduce`; `keepdim` keeps reduced dimensions at size 1; over no dimension the result is the value.

    A sum starts at 0, so that -0.0 becomes 0.0, over no dimension too.
    """
    folded = ctx.reduce(op, args, dims) if dims else args[-1]
    if op == "sum" and not dims and folded.dtype.is_floating_point:
        folded = combine(lambda x: x + 0.0, folded)
    return kept(folded, dims) if keepdim else folded


def kept(folded: Value, dims: Sequence[int]) -> Value:
    """Insert dimensions of size 1 into `folded` at `dims` (of the tensor before), which were reduced."""
    rank = folded.rank + len(dims)
    kept_dims = [k for k in range(rank) if k not in dims]
    shape = [ONE] * rank
    for size, k in zip(folded.shape, kept_dims, strict=True):
        shape[k] = size
    return folded.view(tuple(shape), [axis_symbol(k) for k in kept_dims])


def count(x: Value, dims: Sequence[int]) -> sympy.Expr:
    """Return the number of elements in a reduction over `dims`."""
    return sympy.Mul(*(x.shape[k] for k in dims))


def mean_over(ctx: Builder, x: Value, dims: Sequence[int]) -> Value:
    """Return the mean of x (already wide) over `dims`, kept at size 1."""
    return combine(lambda s: s / count(x, dims), fold(ctx, "sum", [x], dims, keepdim=True))


# Sums ---------------------------------------------------------------------------------------------------------------


@lowers(aten.sum.default, aten.sum.dim_IntList)
def sum_(
    ctx: Builder,
    x: Value,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    """Σ x."""
    return _accumulated(ctx, "sum", x, dims, keepdim, dtype)


@lowers(aten.prod.default, aten.prod.dim_int)
def prod(
    ctx: Builder, x: Value, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    """Π x."""
    return _accumulated(ctx, "prod", x, dim, keepdim, dtype)


def _accumulated(
    ctx: Builder, op: FoldName, x: Value, dims: Sequence[int] | int | None, keepdim: bool, dtype: torch.dtype | None
) -> Value:
    out = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    if out is torch.bool:
        raise Unsupported(f"{op} as bool")
    return rounded(fold(ctx, op, [widen(convert(x, out))], reduced_dims(x, dims), keepdim), out)


@lowers(aten.mean.default, aten.mean.dim)
def mean(
    ctx: Builder,
    x: Value,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    """Σ x / n; NaN over no elements."""
    out = dtype or x.dtype
    if not out.is_floating_point:
        raise Unsupported(f"mean as {out}")
    over = reduced_dims(x, dims)
    total = fold(ctx, "sum", [widen(convert(x, out))], over, keepdim)
    return rounded(combine(lambda s: s / count(x, over), total), out)


@lowers(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(ctx: Builder, x: Value, dims: Sequence[int] | None = None) -> Value:
    """The number of non-zero elements."""
    ones = convert(convert(x, torch.bool), torch.int64)
    return fold(ctx, "sum", [ones], reduced_dims(x, dims))


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def any_(ctx: Builder, x: Value, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> Value:
    """Whether some element is not 0."""
    return _logical(ctx, "any", x, dims, keepdim)


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def all_(ctx: Builder, x: Value, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> Value:
    """Whether all elements are non-zero."""
    return _logical(ctx, "all", x, dims, keepdim)


def _logical(ctx: Builder, op: FoldName, x: Value, dims: Sequence[int] | int | None, keepdim: bool) -> Value:
    over = [] if dims == [] else reduced_dims(x, dims)
    result = fold(ctx, op, [convert(x, torch.bool)], over, keepdim)
    return convert(result, torch.uint8) if x.dtype is torch.uint8 else result


# Extremes -----------------------------------------------------------------------------------------------------------


def _extreme(ctx: Builder, op: FoldName, x: Value, dims: Sequence[int], keepdim: bool) -> Value:
    if x.dtype is torch.bool:
        return fold(ctx, "any" if op == "max" else "all", [x], dims, keepdim)
    return rounded(fold(ctx, op, [widen(x)], dims, keepdim), x.dtype)


def _position_of(ctx: Builder, op: FoldName, x: Value, dims: Sequence[int], keepdim: bool) -> Value:
    """Return the position of an extreme over `dims`, in row-major order.  Eager raises if there are no elements."""
    if any(x.shape[k] == 0 for k in dims):
        raise Unsupported("the extreme of no elements")
    if not dims:
        return Value(x.shape, torch.int64, x.device, literal(0, torch.int64))
    strides = contiguous_strides(tuple(x.shape[k] for k in dims))
    at = sympy.Add(*(axis_symbol(k) * s for k, s in zip(dims, strides, strict=True)))
    positions = Value(x.shape, torch.int64, x.device, IndexValue(at))
    values = convert(x, torch.uint8) if x.dtype is torch.bool else widen(x)
    return fold(ctx, op, [values, positions], dims, keepdim)


@lowers(aten.amax.default)
def amax(ctx: Builder, x: Value, dims: Sequence[int] = (), keepdim: bool = False) -> Value:
    """The largest element; NaN if one is."""
    return _extreme(ctx, "max", x, reduced_dims(x, dims), keepdim)


@lowers(aten.amin.default)
def amin(ctx: Builder, x: Value, dims: Sequence[int] = (), keepdim: bool = False) -> Value:
    """The smallest element; NaN if one is."""
    return _extreme(ctx, "min", x, reduced_dims(x, dims), keepdim)


@lowers(aten.max.default)
def max_all(ctx: Builder, x: Value) -> Value:
    """The largest element of all; NaN if one is."""
    return _extreme_of_all(ctx, "max", x)


@lowers(aten.min.default)
def min_all(ctx: Builder, x: Value) -> Value:
    """The smallest element of all; NaN if one is."""
    return _extreme_of_all(ctx, "min", x)


def _extreme_of_all(ctx: Builder, op: FoldName, x: Value) -> Value:
    if 0 in x.shape:
        raise Unsupported("the extreme of no elements")
    return _extreme(ctx, op, x, reduced_dims(x, None), False)


@lowers(aten.max.dim)
def max_dim(ctx: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, ...]:
    """(the largest elements, their positions)."""
    over = reduced_dims(x, dim)
    return _extreme(ctx, "max", x, over, keepdim), _position_of(ctx, "argmax", x, over, keepdim)


@lowers(aten.min.dim)
def min_dim(ctx: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, ...]:
    """(the smallest elements, their positions)."""
    over = reduced_dims(x, dim)
    return _extreme(ctx, "min", x, over, keepdim), _position_of(ctx, "argmin", x, over, keepdim)


@lowers(aten.argmax.default)
def argmax(ctx: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """The first position of the largest element; a NaN is the largest."""
    return _position_of(ctx, "argmax", x, reduced_dims(x, dim), keepdim)


@lowers(aten.argmin.default)
def argmin(ctx: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """The first position of the smallest element; a NaN is the smallest."""
    return _position_of(ctx, "argmin", x, reduced_dims(x, dim), keepdim)


@lowers(aten.aminmax.default)
def aminmax(ctx: Builder, x: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, ...]:
    """(the smallest elements, the largest)."""
    over = reduced_dims(x, dim)
    return _extreme(ctx, "min", x, over, keepdim), _extreme(ctx, "max", x, over, keepdim)


# Norms --------------------------------------------------------------------------------------------------------------


@lowers(aten.linalg_vector_norm.default)
def vector_norm(
    ctx: Builder,
    x: Value,
    ord: float = 2,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    """(Σ |x|^ord)^(1 / ord) and its limits: the extremes of |x| at ±infinity, the count of non-zeros at 0."""
    out = dtype or x.dtype
    if not out.is_floating_point:
        raise Unsupported(f"norm as {out}")
    over = reduced_dims(x, dims)
    wide = widen(convert(x, out))
    if math.isinf(ord):
        return rounded(fold(ctx, "max" if ord > 0 else "min", [combine(absolute, wide)], over, keepdim), out)
    inner, outer = _norm_parts(float(ord))
    return rounded(combine(outer, fold(ctx, "sum", [combine(inner, wide)], over, keepdim)), out)


def _norm_parts(ord: float) -> tuple[Callable[[Term], Term], Callable[[Term], Term]]:
    if ord == 0:
        return (lambda a: ne(a, 0).to(a.dtype)), (lambda s: s)
    if ord == 1:
        return absolute, (lambda s: s)
    if ord == 2:
        return (lambda a: a * a), sqrt
    return (lambda a: call("pow", absolute(a), ord)), (lambda s: call("pow", s, 1 / ord))


@lowers(aten.logsumexp.default)
def logsumexp(ctx: Builder, x: Value, dims: Sequence[int], keepdim: bool = False) -> Value:
    """log Σ exp(x), shifted by the maximum."""
    if not x.dtype.is_floating_point:
        raise Unsupported(f"logsumexp of {x.dtype}")
    over, wide = reduced_dims(x, dims), widen(x)
    largest = fold(ctx, "max", [wide], over, keepdim=True)
    shift = combine(lambda m: where(isinf(m), 0.0, m), largest)
    total = fold(ctx, "sum", [combine(lambda a, m: exp(a - m), wide, shift)], over, keepdim=True)
    result = combine(lambda s, m: log(s) + m, total, shift)
    if not keepdim:
        result = _squeezed(result, over)
    return rounded(result, x.dtype)


def _squeezed(value: Value, dims: Sequence[int]) -> Value:
    """Drop the dimensions of size 1 at `dims`."""
    kept_dims = [k for k in range(value.rank) if k not in dims]
    index = [ZERO if k in dims else axis_symbol(kept_dims.index(k)) for k in range(value.rank)]
    return value.view(tuple(value.shape[k] for k in kept_dims), index)


# Variances ----------------------------------------------------------------------------------------------------------


def moments(
    ctx: Builder, x: Value, dims: Sequence[int], correction: float | sympy.Expr = 0, *, corrected: bool = False
) -> tuple[Value, Value]:
    """(variance, mean) of x (already wide) over `dims`, both kept at size 1, in two passes.

    With `corrected`, the error that the rounding of the mean adds to the squares is subtracted: (Σ (x - mean))² / n
    (Chan, Golub, LeVeque: Algorithms for Computing the Sample Variance, 1983).  The mean itself is corrected by
    Σ (x - mean) / n: the mean of equal numbers is exact, and the mean of a row with an infinity is NaN, as in eager,
    which updates it number by number.
    """
    size = count(x, dims)
    average = x if size == 1 else mean_over(ctx, x, dims)  # one number is its own mean, an infinity too
    squares = combine(lambda a, m: (a - m) * (a - m), x, average)
    total = fold(ctx, "sum", [squares], dims, keepdim=True)
    if corrected and size != 1:
        rest = fold(ctx, "sum", [combine(lambda a, m: a - m, x, average)], dims, keepdim=True)
        points = Term(literal(size, x.dtype))
        total = combine(lambda s, r: maximum(s - r * r / points, 0.0), total, rest)
        average = combine(lambda m, r: m + r / points, average, rest)
    if size.is_Integer and not isinstance(correction, sympy.Expr):
        return combine(lambda s: s / max(float(size) - correction, 0.0), total), average
    return combine(lambda s: s / maximum(Term(literal(size, s.dtype)) - correction, 0.0), total), average


def _variance(
    ctx: Builder,
    x: Value,
    dims: Sequence[int] | None,
    correction: float | sympy.Expr | None,
    keepdim: bool,
) -> tuple[Value, Value]:
    if not x.dtype.is_floating_point:
        raise Unsupported(f"variance of {x.dtype}")
    over = reduced_dims(x, dims)
    variance_and_mean = moments(ctx, widen(x), over, 1 if correction is None else correction, corrected=True)
    return (
        variance_and_mean if keepdim else (_squeezed(variance_and_mean[0], over), _squeezed(variance_and_mean[1], over))
    )


@lowers(aten.var.correction)
def var(
    ctx: Builder,
    x: Value,
    dims: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Value:
    """Σ (x - mean)² / (n - correction)."""
    return rounded(_variance(ctx, x, dims, correction, keepdim)[0], x.dtype)


@lowers(aten.std.correction)
def std(
    ctx: Builder,
    x: Value,
    dims: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Value:
    """The root of the variance."""
    return rounded(combine(sqrt, _variance(ctx, x, dims, correction, keepdim)[0]), x.dtype)


@lowers(aten.var_mean.correction)
def var_mean(
    ctx: Builder,
    x: Value,
    dims: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Value, ...]:
    """(variance, mean)."""
    variance, average = _variance(ctx, x, dims, correction, keepdim)
    return rounded(variance, x.dtype), rounded(average, x.dtype)


@lowers(aten.std_mean.correction)
def std_mean(
    ctx: Builder,
    x: Value,
    dims: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Value, ...]:
    """(the root of the variance, mean)."""
    variance, average = _variance(ctx, x, dims, correction, keepdim)
    return rounded(combine(sqrt, variance), x.dtype), rounded(average, x.dtype)
