"""Defines folds and scans of tensors by torch operations.

Input: the values that are folded, as tensors of one dimension per axis; output: the result, in the type in which it is
accumulated.  The operations are listed in `scalar_ops.FOLD_OPS` and `SCAN_OPS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from fusion.lowering.ir.scalar_ops import FoldName, ScanName, accumulator


def fold(op: FoldName, args: Sequence[torch.Tensor], dims: Sequence[int]) -> list[torch.Tensor]:
    """Reduce `args` (broadcast to a common shape along `dims`, which are not empty) over `dims`, which keep size 1.

    Sums and products of types narrower than 32 bits are kept in float32 or int64.  For argmax and argmin the result is
    [value, index]: NaN wins, then the lowest index.

    >>> fold("argmax", [torch.tensor([1.0, 3.0, 3.0]), torch.tensor([0, 1, 2])], [0])
    [tensor([3.]), tensor([1])]
    """
    if not dims:  # to torch, no dimension means all of them
        return [part.squeeze(-1) for part in fold(op, [arg.unsqueeze(-1) for arg in args], [args[0].ndim])]
    if op == "dot":
        return [_dot(args[0], args[1], dims)]
    value = args[0]
    if op in ("sum", "prod"):
        wide = value.to(_wide(value.dtype))
        if op == "sum":
            return [wide.sum(dim=list(dims), keepdim=True, dtype=wide.dtype)]
        return [reduce(lambda t, d: t.prod(dim=d, keepdim=True, dtype=wide.dtype), dims, wide)]
    if op in ("any", "all"):
        return [value.any(list(dims), keepdim=True) if op == "any" else value.all(list(dims), keepdim=True)]
    largest = op in ("max", "argmax")
    best = value.amax(list(dims), keepdim=True) if largest else value.amin(list(dims), keepdim=True)
    if op in ("max", "min"):
        return [best]
    chosen = (value == best) | (value != value)  # NaN: if there is one, best is NaN and equals nothing
    index = torch.where(chosen, args[1], torch.iinfo(torch.int64).max).amin(list(dims), keepdim=True)
    return [best, index]


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= 4 else torch.float32
    return torch.int64


def _dot(lhs: torch.Tensor, rhs: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Sum lhs·rhs over `dims`, each operand over the axes it spans, accumulated in `scalar_ops.accumulator`'s type."""
    result = accumulator("dot", lhs.dtype)
    # Integer products are summed exactly in float64, which matrix routines know, as long as operands are narrow.
    work = result if result.is_floating_point else torch.float64 if lhs.itemsize <= 2 else torch.int64
    operands, labels = [], []
    for operand in (lhs, rhs):
        kept = [d for d, size in enumerate(operand.shape) if size != 1]
        operands.append(operand.reshape([operand.shape[d] for d in kept]).to(work))
        labels.append(kept)
    out = [d for d in range(lhs.ndim) if d not in dims and (d in labels[0] or d in labels[1])]
    total = torch.einsum(operands[0], labels[0], operands[1], labels[1], out)
    if not result.is_floating_point:
        total = total.to(torch.int64)
    shape = [max(lhs.shape[d], rhs.shape[d]) if d in out else 1 for d in range(lhs.ndim)]
    return total.reshape(shape).to(result)


def scan(op: ScanName, args: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Fold `args` (of one shape) up to each point of `dim`.

    >>> scan("argmax", [torch.tensor([1.0, 3.0, 3.0]), torch.tensor([0, 1, 2])], 0)
    tensor([0, 1, 2])
    """
    value = args[0]
    if op in ("sum", "prod"):
        return (torch.cumsum if op == "sum" else torch.cumprod)(value, dim, dtype=value.dtype)
    if op == "logsumexp":
        return torch.logcumsumexp(value, dim)
    result = (torch.cummax if op in ("max", "argmax") else torch.cummin)(value, dim)
    return result.values if op in ("max", "min") else args[1].gather(dim, result.indices)
