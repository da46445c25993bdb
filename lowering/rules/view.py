"""Views: never nodes, only another index on the load that reads through them."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from lowering.builder import Builder
from lowering.indexing import axis_symbol
from lowering.registry import lowers
from lowering.value import Value, broadcast_to, reshape

aten = torch.ops.aten


@lowers(aten.view.default, aten._unsafe_view.default, aten.reshape.default, lazy=True)
def view(ctx: Builder, x: Value, shape: Sequence[int | sympy.Expr]) -> Value:
    """The same elements in row-major order under `shape`, where one size may be -1."""
    sizes = [sympy.sympify(size) for size in shape]
    known = sympy.Mul(*(size for size in sizes if size != -1))
    total = sympy.Mul(*x.shape)
    return reshape(x, tuple(total / known if size == -1 else size for size in sizes))


@lowers(aten.permute.default, lazy=True)
def permute(ctx: Builder, x: Value, dims: Sequence[int]) -> Value:
    """Dimension k of the result is dimension dims[k] of x."""
    order = [d % x.rank for d in dims]
    index: list[sympy.Expr] = [sympy.Integer(0)] * x.rank
    for k, d in enumerate(order):
        index[d] = axis_symbol(k)
    return x.view(tuple(x.shape[d] for d in order), index)


@lowers(aten.expand.default, lazy=True)
def expand(ctx: Builder, x: Value, shape: Sequence[int | sympy.Expr], *, implicit: bool = False) -> Value:
    """x broadcast to `shape`, where -1 keeps a dimension."""
    skip = len(shape) - x.rank
    sizes = tuple(x.shape[k - skip] if size == -1 else sympy.sympify(size) for k, size in enumerate(shape))
    return broadcast_to(x, sizes)
