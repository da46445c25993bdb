"""Decomposes scaled dot-product attention: `F.scaled_dot_product_attention`, forward and backward.

Input: a call as eager takes it; output: the same result from products, maps and reductions over rows, which the rules
lower like attention written by hand.  Backward is given by formula from the logarithm of each row's sum, one number per
row, as a library kernel does.

A row that attends to nothing gives zeros and has no gradient, as in eager: its maximum is -inf, and the logarithm of
its sum counts as 0, so that every exp(score - 0) = exp(-inf) is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    order: Sequence[int] | None = None,
    wide: bool = False,
) -> Tensor:
    """Compute softmax(query · keyᵀ · scale + mask) · value, with dropout on the weights.

    Args:
        query: [..., heads, l, e]; key: [..., heads of keys, s, e]; value: [..., heads of keys, s, ev].
        attn_mask: broadcasts to [..., heads, l, s]; bool (True attends), or added to the scores.
        is_causal: row l attends to columns 0 … l, whatever s is; replaces a mask.
        scale: factor of the scores; 1/√e by default.
        enable_gqa: each head of the keys serves heads // (heads of keys) consecutive heads of the query.
        order: dimensions of the result from the outermost in memory to the innermost; as they come by default.
        wide: without gradients, scores are products in float32; stored scores of narrower operands would be rounded.

    >>> q, k, v = torch.ones(2, 4, 3, 8), torch.ones(2, 2, 5, 8), torch.ones(2, 2, 5, 6)
    >>> attention(q, k, v, is_causal=True, enable_gqa=True).shape
    torch.Size([2, 4, 3, 6])
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (as_autocast(x, dtype) for x in (query, key, value))
        attn_mask = None if attn_mask is None else as_autocast(attn_mask, dtype)
    with torch.autocast(device, enabled=False):
        if enable_gqa:
            key, value = (shared_heads(x, query.shape[-3]) for x in (key, value))
        shapes = (query.shape[:-2], key.shape[:-2], value.shape[:-2])
        batch: tuple[int, ...] = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]  # not annotated in PyTorch
        query, key, value = (x.expand(*batch, *x.shape[-2:]) for x in (query, key, value))
        if is_causal:
            attn_mask = _causal(query.shape[-2], key.shape[-2], query.device)
        if attn_mask is not None and attn_mask.requires_grad:
            attn_mask = _by_rows(attn_mask)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        order = tuple(range(query.dim()) if order is None else order)
        arguments = query, key, value, attn_mask, dropout_p, scale, order
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            return _Attention.apply(*arguments)[0]  # type: ignore[no-any-return, no-untyped-call]  # not annotated in PyTorch
        return _forward(*arguments, wide=wide)[0]


def as_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast an argument as autocast does: floats other than float64 become `dtype`."""
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


def shared_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each of the g key heads: [..., g, s, e] → [..., heads, s, e]."""
    *batch, groups, rows, width = x.shape
    repeats = heads // groups
    return x.unsqueeze(-3).expand(*batch, groups, repeats, rows, width).reshape(*batch, heads, rows, width)


def _causal(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.arange(rows, device=device)[:, None] >= torch.arange(columns, device=device)


def _by_rows(mask: Tensor) -> Tensor:
    """Copy a mask whose neighbours along a row are apart in memory, without repeating what it broadcasts.

    >>> _by_rows(torch.zeros(5, 6, 4).permute(2, 0, 1).expand(3, 4, 5, 6)).stride()
    (0, 30, 6, 1)
    """
    if mask.stride(-1) in (0, 1):
        return mask
    narrow = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    return narrow.contiguous().expand(mask.shape)


def _laid_out(x: Tensor, order: Sequence[int]) -> Tensor:
    """Copy `x` so that its dimensions are in memory in `order`.

    >>> _laid_out(torch.zeros(2, 3, 4), (1, 0, 2)).stride()
    (4, 8, 1)
    """
    back = [list(order).index(dim) for dim in range(x.dim())]
    return x.permute(*order).contiguous().permute(*back)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, *, converted: bool = False) -> Tensor:
    """Compute the scores [..., l, s] for softmax, in float32 or wider; also their products, if `converted`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    if converted:
        query, key = query.to(wide), key.to(wide)
    scores = (query @ key.mT).to(wide) * scale
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.to(wide)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float,
    order: tuple[int, ...],
    *,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the result, the logsumexp of each row, and the dropout mask (None without dropout)."""
    scores = _scores(query, key, mask, scale, converted=wide)
    weights, logarithm, _ = weights_of(scores, guarded=mask is not None)
    kept = torch.rand_like(weights) >= dropout if dropout else None
    if kept is not None:
        weights = weights * _factor(kept, dropout)
    return _laid_out(weights.to(value.dtype) @ value, order), logarithm, kept


def weights_of(scores: Tensor, *, guarded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the softmax of each row of scores, the logarithm of its sum, and its maximum, both [..., l, 1].

    Args:
        guarded: a row may be -inf throughout; its weights are then 0, and so is the logarithm.
    """
    largest = pivot = scores.amax(-1, keepdim=True)
    if guarded:
        pivot = largest.masked_fill(largest == -math.inf, 0)
    weights = torch.exp(scores - pivot)
    total = weights.sum(-1, keepdim=True)
    if guarded:
        total = total.masked_fill(total == 0, 1)
    return weights / total, pivot + total.log(), largest


def _mask_grad(score_grads: Tensor, scaled: Tensor, scale: float, mask: Tensor) -> Tensor:
    """Return the gradient of the mask, from the gradients of the scores.

    These are in memory only as `scaled`, the operand of two products.  In bfloat16 its elements are summed, as they are
    for the bias of PyTorch's memory-efficient kernel; in float16 small ones would lose digits.
    """
    if scaled.dtype is not torch.bfloat16 or scale == 0:
        return score_grads.sum_to_size(mask.shape).to(mask.dtype)
    return (scaled.to(score_grads.dtype).sum_to_size(mask.shape) / scale).to(mask.dtype)


def _factor(kept: Tensor, dropout: float) -> Tensor:
    return kept * (0.0 if dropout == 1 else 1 / (1 - dropout))


_Given: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor | None, float, float, tuple[int, ...]]"
"""The arguments of `_forward`."""


class _AttentionContext(Protocol):
    """The context that PyTorch hands from forward to backward."""

    dropout: float
    scale: float
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class _Attention(torch.autograd.Function):
    """`_forward` with an analytic gradient (Dao et al. 2022, appendix B)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*given: object) -> tuple[Tensor, Tensor, Tensor | None]:
        return _forward(*cast("_Given", given))

    @staticmethod
    def setup_context(ctx: _AttentionContext, inputs: _Given, output: tuple[Tensor, Tensor, Tensor | None]) -> None:
        query, key, value, mask, ctx.dropout, ctx.scale, _ = inputs
        ctx.mark_non_differentiable(*(x for x in output[1:] if x is not None))
        ctx.save_for_backward(query, key, value, mask, *output)

    @staticmethod
    def backward(ctx: _AttentionContext, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, logarithm, kept = ctx.saved_tensors
        weights = torch.exp(_scores(query, key, mask, ctx.scale) - logarithm)
        wide = weights.dtype
        score_grads, dropped = (grad @ value.mT).to(wide), weights
        if kept is not None:
            score_grads, dropped = score_grads * _factor(kept, ctx.dropout), weights * _factor(kept, ctx.dropout)
        row_dots = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        score_grads = weights * (score_grads - row_dots)
        scaled = (score_grads * ctx.scale).to(query.dtype)
        mask_grad = None
        if mask is not None and ctx.needs_input_grad[3]:
            mask_grad = _mask_grad(score_grads, scaled, ctx.scale, mask)
        return scaled @ key, scaled.mT @ query, dropped.to(grad.dtype).mT @ grad, mask_grad, None, None, None
