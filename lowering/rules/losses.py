"""Lowers losses with requirements on their inputs; PyTorch decomposes the others."""

from __future__ import annotations

import torch

from fusion.lowering.builder import Builder
from fusion.lowering.ir.requirements import Requirement
from fusion.lowering.registry import lowers
from fusion.lowering.rules.formula import Term, log, log1p, maximum
from fusion.lowering.rules.promotion import combine, requiring, rounded, widen
from fusion.lowering.rules.reduction import fold, mean_over
from fusion.lowering.value import Value, reshape

aten = torch.ops.aten

NONE, MEAN, SUM = range(3)

LEAST_LOG = -100.0
"""Eager's bound on the logarithms of probabilities."""


@lowers(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    ctx: Builder, x: Value, target: Value, weight: Value | None = None, reduction: int = MEAN
) -> Value:
    """weight·(-target·log x - (1 - target)·log(1 - x)), each logarithm -100 at least: each, the mean or the sum."""
    probability = requiring(Requirement.UNIT_INTERVAL, lambda p: (p >= 0) & (p <= 1), widen(x))
    loss = combine(_cross_entropy, probability, widen(target))
    if weight is not None:
        loss = combine(lambda each, by: each * by, loss, widen(weight))
    dims = list(range(loss.rank))
    if reduction == SUM:
        loss = fold(ctx, "sum", [loss], dims, keepdim=False)
    elif reduction == MEAN:
        loss = reshape(mean_over(ctx, loss, dims), ())
    return rounded(loss, x.dtype)


def _cross_entropy(p: Term, target: Term) -> Term:
    return (target - 1) * maximum(log1p(-p), LEAST_LOG) - target * maximum(log(p), LEAST_LOG)
