"""Lowers scaled sums: a + alpha·b and its differences.

Under strict numerics (`Wanted.rounded`) they are rounded as inside eager's kernels: on a CPU 16-bit floats are scaled
and added in their own dtype, and numbers are rounded to it first; otherwise alpha·b is added unrounded, by a fused
multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.scalar_ops import HALVES
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import Term
from fusion.lowering.rules.promotion import Argument, Kind, common_place, compose, overloads, promote
from fusion.lowering.value import Value

aten = torch.ops.aten


@lowers(*overloads(aten.add))
def add(ctx: Builder, a: Argument, b: Argument, *, alpha: Argument = 1) -> Value:
    """a + alpha·b."""
    return _sum(ctx, a, b, alpha, lambda x, y: x + y)


@lowers(*overloads(aten.sub))
def sub(ctx: Builder, a: Argument, b: Argument, alpha: Argument = 1) -> Value:
    """a - alpha·b."""
    _refuse_bools(a, b)
    return _sum(ctx, a, b, alpha, lambda x, y: x - y)


@lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: Builder, a: Argument, b: Argument, alpha: Argument = 1) -> Value:
    """b - alpha·a."""
    _refuse_bools(a, b)
    return _sum(ctx, b, a, alpha, lambda x, y: x - y)


def _refuse_bools(*args: Argument) -> None:
    """Refuse a difference with a tensor of bools, for which eager raises."""
    if any(isinstance(arg, Value) and arg.dtype is torch.bool for arg in args):
        raise Unsupported("a difference of bools")


def _sum(ctx: Builder, a: Argument, b: Argument, alpha: Argument, join: Callable[[Term, Term], Term]) -> Value:
    """Return `join` of a and alpha·b."""
    assert not isinstance(alpha, Value)
    compute, result = promote((a, b), Kind.DEFAULT)
    if not ctx.wanted.rounded or not result.is_floating_point:
        return compose(lambda x, y: join(x, y if alpha == 1 else alpha * y), a, b)
    if result in HALVES and common_place((a, b))[1].type == "cpu":
        a, b, alpha = (_rounded(arg, result) for arg in (a, b, alpha))
        return compose(lambda x, y: join(x, y if alpha == 1 else (alpha * y).to(result).to(compute)), a, b)
    scale = _rounded(alpha, compute)
    assert not isinstance(scale, Value)
    if scale == 1:
        return compose(join, a, b)

    def at_once(x: Term, y: Term) -> Term:
        double = torch.float64  # holds the product of two float32 exactly
        return join(x.to(double), scale * y.to(double)).to(compute)

    return compose(at_once, a, b)


def _rounded(arg: Argument, dtype: torch.dtype) -> Argument:
    """Round a number to `dtype`; return other arguments unchanged."""
    return torch.tensor(arg, dtype=dtype).item() if isinstance(arg, (int, float)) else arg
