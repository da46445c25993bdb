"""Lowers softmax and the norms, with their gradients.

Everything is computed in float32 for 16-bit floats and rounded once; statistics have the dtype and shape that eager
returns.  Variances take two passes.  Batch norms are decomposed before (see `lowering/aten/decompositions.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.indexing import ONE, FloorDiv, axis_symbol
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import Term, eq, exp, log, rsqrt, where
from fusion.lowering.rules.promotion import combine, convert, rounded, widen, widened
from fusion.lowering.rules.reduction import fold, mean_over, moments, reduced_dims
from fusion.lowering.value import Value, reshape

aten = torch.ops.aten


def _dtypes(ctx: Builder) -> list[torch.dtype | None]:
    """The dtypes of the tensors that the call being lowered returns."""
    return [None if part is None else part.dtype for part in ctx.current.meta["val"]]


def _results(ctx: Builder, *values: Value | None) -> tuple[Value | None, ...]:
    """Return `values` in the dtypes of eager's results."""
    return tuple(
        None if value is None or dtype is None else rounded(value, dtype)
        for value, dtype in zip(values, _dtypes(ctx), strict=True)
    )


# Softmax ------------------------------------------------------------------------------------------------------------


def _exponentials(ctx: Builder, x: Value, dim: int) -> tuple[Value, Value, Value]:
    """(exp(x - max), its sum, max) along `dim` of a wide x; the last two kept at size 1."""
    dims = reduced_dims(x, dim)
    largest = fold(ctx, "max", [x], dims, keepdim=True)
    powers = combine(lambda a, m: exp(a - m), x, largest)
    return powers, fold(ctx, "sum", [powers], dims, keepdim=True), largest


@lowers(aten._softmax.default)
def softmax(ctx: Builder, x: Value, dim: int, half_to_float: bool) -> Value:
    """exp(x - max) / Σ exp(x - max); NaN where everything is -inf."""
    powers, total, _ = _exponentials(ctx, widen(x), dim)
    out = widened(x.dtype) if half_to_float else x.dtype
    return rounded(combine(lambda p, s: p / s, powers, total), out)


@lowers(aten._safe_softmax.default)
def safe_softmax(ctx: Builder, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """Softmax with 0 where everything is -inf."""
    source = x if dtype is None else convert(x, dtype)
    powers, total, largest = _exponentials(ctx, widen(source), dim)
    empty = combine(lambda m: eq(m, float("-inf")), largest)
    return rounded(combine(lambda p, s, e: where(e, 0.0, p / s), powers, total, empty), source.dtype)


@lowers(aten._log_softmax.default)
def log_softmax(ctx: Builder, x: Value, dim: int, half_to_float: bool) -> Value:
    """x - max - log Σ exp(x - max)."""
    wide = widen(x)
    _, total, largest = _exponentials(ctx, wide, dim)
    out = widened(x.dtype) if half_to_float else x.dtype
    return rounded(combine(lambda a, m, s: a - m - log(s), wide, largest, total), out)


@lowers(aten._softmax_backward_data.default)
def softmax_backward(ctx: Builder, grad: Value, output: Value, dim: int, input_dtype: torch.dtype) -> Value:
    """y·(grad - Σ grad·y)."""
    g, y = widen(grad), widen(output)
    total = fold(ctx, "sum", [combine(_product, g, y)], reduced_dims(g, dim), keepdim=True)
    return rounded(combine(lambda a, p, s: p * (a - s), g, y, total), input_dtype)


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(ctx: Builder, grad: Value, output: Value, dim: int, input_dtype: torch.dtype) -> Value:
    """grad - exp(y)·Σ grad."""
    g = widen(grad)
    total = fold(ctx, "sum", [g], reduced_dims(g, dim), keepdim=True)
    return rounded(combine(lambda a, y, s: a - exp(y) * s, g, widen(output), total), input_dtype)


def _product(a: Term, b: Term) -> Term:
    return a * b


# Layer norm ---------------------------------------------------------------------------------------------------------


def _inner_dims(x: Value, normalized_shape: Sequence[object]) -> tuple[list[int], list[int]]:
    """(dimensions outside the norm, dimensions inside)."""
    axis = x.rank - len(normalized_shape)
    return list(range(axis)), list(range(axis, x.rank))


def _scaled(x: Value, weight: Value | None, bias: Value | None) -> Value:
    """x·weight + bias, as far as they are given; they broadcast against x."""
    if weight is not None:
        x = combine(_product, x, widen(weight))
    return x if bias is None else combine(lambda a, b: a + b, x, widen(bias))


@lowers(aten.native_layer_norm.default)
def layer_norm(
    ctx: Builder,
    x: Value,
    normalized_shape: Sequence[object],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> tuple[Value | None, ...]:
    """((x - mean)·rstd·weight + bias, mean, rstd)."""
    wide = widen(x)
    variance, mean = moments(ctx, wide, _inner_dims(x, normalized_shape)[1])
    rstd = combine(lambda v: rsqrt(v + eps), variance)
    return _results(ctx, _scaled(combine(_standardised, wide, mean, rstd), weight, bias), mean, rstd)


def _standardised(x: Term, mean: Term, rstd: Term) -> Term:
    return (x - mean) * rstd


@lowers(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    ctx: Builder,
    grad: Value,
    x: Value,
    normalized_shape: Sequence[object],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    """The gradients of x, weight and bias that `mask` selects."""
    outer, inner = _inner_dims(x, normalized_shape)
    g, scale = widen(grad), widen(rstd)
    normal = combine(_standardised, widen(x), widen(mean), scale)
    dx = _through_norm(ctx, _scaled(g, weight, None), normal, scale, inner) if mask[0] else None
    dweight = fold(ctx, "sum", [combine(_product, g, normal)], outer) if mask[1] else None
    dbias = fold(ctx, "sum", [g], outer) if mask[2] else None
    return _results(ctx, dx, dweight, dbias)


def _through_norm(ctx: Builder, g: Value, normal: Value, rstd: Value, dims: Sequence[int]) -> Value:
    """rstd·(g - mean(g) - normal·mean(g·normal)): the gradient of (x - mean)·rstd, given that of its result."""
    average = mean_over(ctx, g, dims)
    aligned = mean_over(ctx, combine(_product, g, normal), dims)
    return combine(lambda a, n, r, m, c: r * (a - m - n * c), g, normal, rstd, average, aligned)


# RMS norm -----------------------------------------------------------------------------------------------------------


@lowers(aten._fused_rms_norm.default)
def rms_norm(
    ctx: Builder, x: Value, normalized_shape: Sequence[object], weight: Value | None, eps: float | None
) -> tuple[Value | None, ...]:
    """(x·rstd·weight, rstd) with rstd = 1 / sqrt(mean(x²) + eps); the default eps is that of the computing dtype."""
    wide = widen(x)
    small = torch.finfo(wide.dtype).eps if eps is None else eps
    power = mean_over(ctx, combine(_product, wide, wide), _inner_dims(x, normalized_shape)[1])
    rstd = combine(lambda p: rsqrt(p + small), power)
    return _results(ctx, _scaled(combine(_product, wide, rstd), weight, None), rstd)


@lowers(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    ctx: Builder,
    grad: Value,
    x: Value,
    normalized_shape: Sequence[object],
    rstd: Value,
    weight: Value | None,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    """The gradients of x and weight that `mask` selects."""
    outer, inner = _inner_dims(x, normalized_shape)
    g, scale = widen(grad), widen(rstd)
    normal = combine(_product, widen(x), scale)
    dweight = fold(ctx, "sum", [combine(_product, g, normal)], outer) if mask[1] and weight is not None else None
    dx = None
    if mask[0]:
        through = _scaled(g, weight, None)
        aligned = mean_over(ctx, combine(_product, through, normal), inner)
        dx = combine(lambda a, n, r, c: r * (a - n * c), through, normal, scale, aligned)
    return _results(ctx, dx, dweight)


# Group norm ---------------------------------------------------------------------------------------------------------


def _per_channel(weight: Value | None, groups: int | sympy.Expr) -> Value | None:
    """A value per channel as [1, groups, channels of a group, 1], to broadcast to [n, groups, channels, pixels]."""
    if weight is None:
        return None
    shape = (ONE, sympy.sympify(groups), FloorDiv(weight.shape[0], sympy.sympify(groups)), ONE)
    return reshape(weight, shape)


def _grouped(x: Value, n: int | sympy.Expr, c: int | sympy.Expr, pixels: int | sympy.Expr, groups: int) -> Value:
    """x as [n, groups, channels of a group, pixels]."""
    shape = (n, groups, FloorDiv(sympy.sympify(c), sympy.sympify(groups)), pixels)
    return reshape(x, tuple(map(sympy.sympify, shape)))


@lowers(aten.native_group_norm.default)
def group_norm(
    ctx: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: int | sympy.Expr,
    c: int | sympy.Expr,
    pixels: int | sympy.Expr,
    groups: int,
    eps: float,
) -> tuple[Value | None, ...]:
    """(x normalised over each group's channels and pixels, ·weight + bias, mean, rstd), statistics as [n, groups]."""
    wide = _grouped(widen(x), n, c, pixels, groups)
    variance, mean = moments(ctx, wide, [2, 3])
    rstd = combine(lambda v: rsqrt(v + eps), variance)
    normal = combine(_standardised, wide, mean, rstd)
    out = _scaled(normal, _per_channel(weight, groups), _per_channel(bias, groups))
    per_group = (axis_symbol(0), axis_symbol(1), sympy.Integer(0), sympy.Integer(0))
    shape = wide.shape[:2]
    return _results(ctx, reshape(out, x.shape), mean.view(shape, per_group), rstd.view(shape, per_group))


@lowers(aten.native_group_norm_backward.default)
def group_norm_backward(
    ctx: Builder,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    n: int | sympy.Expr,
    c: int | sympy.Expr,
    pixels: int | sympy.Expr,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    """The gradients of x, weight and bias that `mask` selects."""
    g, wide = (_grouped(widen(value), n, c, pixels, groups) for value in (grad, x))
    statistics = (*g.shape[:2], ONE, ONE)
    scale = reshape(widen(rstd), statistics)
    normal = combine(_standardised, wide, reshape(widen(mean), statistics), scale)
    channels = (sympy.sympify(c),)
    dx = dweight = dbias = None
    if mask[0]:
        through = _scaled(g, _per_channel(weight, groups), None)
        dx = reshape(_through_norm(ctx, through, normal, scale, [2, 3]), x.shape)
    if mask[1]:
        dweight = reshape(fold(ctx, "sum", [combine(_product, g, normal)], [0, 3]), channels)
    if mask[2]:
        dbias = reshape(fold(ctx, "sum", [g], [0, 3]), channels)
    return _results(ctx, dx, dweight, dbias)
