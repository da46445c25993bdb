"""Matrix products: Contract nodes, with the bias and scale of `addmm` as pointwise work on the product."""

from __future__ import annotations

import torch

from lowering.builder import Builder
from lowering.errors import Unsupported
from lowering.registry import lowers
from lowering.rules.pointwise import Argument, pointwise
from lowering.value import Value

aten = torch.ops.aten


@lowers(aten.mm.default, aten.bmm.default)
def product(ctx: Builder, lhs: Value, rhs: Value) -> Value:
    """lhs [b?, m, k] · rhs [b?, k, n] → [b?, m, n]."""
    if lhs.dtype is torch.bool or lhs.dtype is not rhs.dtype:
        raise Unsupported(f"matrix product of {lhs.dtype} and {rhs.dtype}")
    if not lhs.dtype.is_floating_point and lhs.dtype is not torch.int8:
        raise Unsupported(f"matrix product of {lhs.dtype}")
    return ctx.contract(lhs, rhs, lhs.dtype)


@lowers(aten.addmm.default, aten.baddbmm.default)
def product_plus(
    ctx: Builder, bias: Value, lhs: Value, rhs: Value, *, beta: Argument = 1, alpha: Argument = 1
) -> Value:
    """beta·bias + alpha·(lhs · rhs); a bias with beta = 0 is not read, so its NaNs do not count."""
    result = product(ctx, lhs, rhs)
    if alpha != 1:
        result = pointwise("mul", result, alpha)
    if beta == 0:
        return result
    scaled = bias if beta == 1 else pointwise("mul", bias, beta)
    return pointwise("add", result, scaled)
