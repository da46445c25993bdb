"""Distances between rows, and products of three: reductions over an axis that no result has."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lowering.builder import Builder
from lowering.errors import Unsupported
from lowering.registry import lowers
from lowering.rules.formula import Term, absolute, call, eq, ne, sqrt, where
from lowering.rules.promotion import combine, convert, widen
from lowering.rules.reduction import fold
from lowering.rules.view import unsqueeze
from lowering.value import Value, broadcast_shapes, broadcast_to

aten = torch.ops.aten


def _apart(ctx: Builder, x1: Value, x2: Value) -> tuple[Value, Value]:
    """Rows [.., p, m] and [.., r, m] against each other: both as [.., p, r, m]."""
    return unsqueeze(ctx, widen(x1), -2), unsqueeze(ctx, widen(x2), -3)


@lowers(aten._cdist_forward.default)
def cdist(ctx: Builder, x1: Value, x2: Value, p: float, compute_mode: int | None) -> Value:
    """The p-norm of the difference of each two rows."""
    gaps = combine(lambda a, b: absolute(a - b), *_apart(ctx, x1, x2))
    over = [gaps.rank - 1]
    if gaps.shape[-1] == 0:
        raise Unsupported("distances of rows without elements")
    if math.isinf(p):
        return convert(fold(ctx, "max", [gaps], over), x1.dtype, implicit=True)
    parts = {
        0.0: lambda a: ne(a, 0).to(a.dtype),
        1.0: lambda a: a,
        2.0: lambda a: a * a,
    }.get(float(p), lambda a: call("pow", a, p))
    total = fold(ctx, "sum", [combine(parts, gaps)], over)
    if p == 2:
        total = combine(sqrt, total)
    elif p not in (0, 1):
        total = combine(lambda s: call("pow", s, 1 / p), total)
    return convert(total, x1.dtype, implicit=True)


@lowers(aten._cdist_backward.default)
def cdist_backward(ctx: Builder, grad: Value, x1: Value, x2: Value, p: float, distances: Value) -> Value:
    """The gradient for x1: 0 where two rows are equal."""
    a, b = _apart(ctx, x1, x2)
    g, d = (unsqueeze(ctx, widen(value), -1) for value in (grad, distances))

    def term(a: Term, b: Term, g: Term, d: Term) -> Term:
        gap = a - b
        sign = call("sign", gap)
        if p == 0:
            return g * 0
        if p == 1:
            return g * sign
        if math.isinf(p):
            return where(eq(absolute(gap), d), g * sign, 0)
        if p == 2:
            return where(eq(d, 0), 0, g * gap / d)
        size = absolute(gap)
        slope = sign * call("pow", size, p - 1) * g / call("pow", d, p - 1)
        nowhere = eq(d, 0) | eq(gap, 0) if p < 1 else eq(d, 0)
        return where(nowhere, 0, slope)

    shape = broadcast_shapes([a.shape, b.shape, g.shape])
    if shape[:-3] != x1.shape[:-2]:
        raise Unsupported("a gradient of what was broadcast")
    full = [broadcast_to(value, shape) for value in (a, b, g, d)]
    total = fold(ctx, "sum", [combine(term, *full)], [len(shape) - 2])
    return convert(total, x1.dtype, implicit=True)


@lowers(aten._trilinear.default)
def trilinear(
    ctx: Builder,
    i1: Value,
    i2: Value,
    i3: Value,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Value:
    """Σ over `sumdim` of the product of three, each with dimensions of size 1 put in."""
    wide = []
    for value, dims in ((i1, expand1), (i2, expand2), (i3, expand3)):
        spread = widen(value)
        for dim in sorted(dims):
            spread = unsqueeze(ctx, spread, dim)
        wide.append(spread)
    shape = broadcast_shapes([value.shape for value in wide])
    product = combine(lambda a, b, c: a * b * c, *(broadcast_to(value, shape) for value in wide))
    return convert(fold(ctx, "sum", [product], sorted(sumdim)), i1.dtype, implicit=True)
