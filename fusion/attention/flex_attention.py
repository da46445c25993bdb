"""Decomposes `flex_attention`: scores that a function of their position modifies, and a mask that is such a function.

Input: Dynamo's graph; output: each call of PyTorch's operator computes the same results from products, maps and
reductions over rows, which the rules lower like attention written by hand.  The lists of blocks that a `BlockMask`
holds are not read: which scores count follows from its function, and which blocks of scores can be skipped from the
bounds of its indices.  PyTorch has no kernel for the operator outside its own compiler, and eager stores the scores; so
there is nothing to weigh, and each call is decomposed.

Backward of the softmax is given by formula, as in `attention`; the gradients of modifications are autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import flex_attention as operator

from fusion.lowering.aten.attention import as_autocast, shared_heads, weights_of

Modification: TypeAlias = Callable[..., Tensor]
"""A function of a score (of a mask: of none), its batch, head, row and column, all of them scalars, and of buffers."""


def decompose_flex_attention(graph: fx.GraphModule) -> None:
    """Replace calls of the operator by calls of its decomposition, also in graphs that this one calls.

    >>> from functools import partial
    >>> from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    >>> from fusion.inspect.examples import show_captured
    >>> mask = create_block_mask(lambda batch, head, row, column: row >= column, None, None, 16, 16, device="cpu")
    >>> q = torch.empty(1, 2, 16, 8)
    >>> attend = partial(flex_attention, block_mask=mask)
    >>> show_captured(decompose_flex_attention, attend, q, q + 1, q + 2)  # doctest: +ELLIPSIS
    - flex_attention = flex_attention(l_args_0_, ...)
    + flex_attention = modified_attention(l_args_0_, ...)
      out = getitem(flex_attention, 0)
      return out
    """
    for _, part in graph.named_children():
        if isinstance(part, fx.GraphModule):
            decompose_flex_attention(part)
    nodes = graph.graph.find_nodes(op="call_function", target=operator)
    for node in nodes:
        node.target = modified_attention
    if nodes:
        graph.recompile()


def modified_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Modification,
    block_mask: Sequence[object],
    scale: float,
    kernel_options: Mapping[str, object],
    score_mod_other_buffers: Sequence[object] = (),
    mask_mod_other_buffers: Sequence[object] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute softmax(score_mod(query · keyᵀ · scale)) · value over the scores that the mask keeps.

    Args:
        query: [batch, heads, l, e]; key: [batch or 1, heads of keys, s, e]; value: [batch or 1, heads of keys, s, ev].
            Each head of the keys serves heads // (heads of keys) consecutive heads of the query.
        block_mask: its last part is the function that is true of scores that count.
        kernel_options: of PyTorch's own kernels; not read.

    Returns:
        The result, and of each row the logarithm of its sum and its maximum, both to base 2; a row without a score
        that counts gives 0, and -inf twice.

    >>> q = torch.ones(1, 2, 3, 8)
    >>> causal = (lambda batch, head, row, column: row >= column,)
    >>> out, logarithm, largest = modified_attention(q, q, q, lambda score, *at: score, causal, 1.0, {})
    >>> out.shape, logarithm[0, 0]
    (torch.Size([1, 2, 3, 8]), tensor([11.5416, 12.5416, 13.1265]))
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (as_autocast(x, dtype) for x in (query, key, value))
    with torch.autocast(device, enabled=False), TransformGetItemToIndex():
        key, value = (shared_heads(x, query.shape[1]).expand(query.shape[0], -1, -1, -1) for x in (key, value))
        scores = _products(query, key) * scale
        at = [torch.arange(size, device=query.device) for size in scores.shape]
        kept = _everywhere(block_mask[-1], 0, len(mask_mod_other_buffers))(*at, *mask_mod_other_buffers)
        modified = _everywhere(score_mod, 1, len(score_mod_other_buffers))(scores, *at, *score_mod_other_buffers)
        counted = torch.where(kept, modified.to(scores.dtype), -math.inf)
        if torch.is_grad_enabled() and (counted.requires_grad or value.requires_grad):
            result, logarithm, largest = _Weighted.apply(counted, value)  # type: ignore[no-untyped-call]  # not annotated in PyTorch
        else:
            result, logarithm, largest = _weighted(counted, value)
        logarithm = torch.where(largest == -math.inf, largest, logarithm)
        return result, logarithm[..., 0] / math.log(2), largest[..., 0] / math.log(2)


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Return the scores in float32 or wider; with gradients, stored scores of narrower operands are rounded."""
    wide = torch.promote_types(query.dtype, torch.float32)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return (query @ key.mT).to(wide)
    return query.to(wide) @ key.to(wide).mT


def _everywhere(modification: object, before: int, after: int) -> Modification:
    """Return a function of all scores at once: of `before` tensors of scores, of positions, and of `after` buffers."""
    assert callable(modification)
    positions = 4
    for place in reversed(range(positions)):
        dims = [0 if each == place else None for each in range(positions)]
        modification = torch.vmap(modification, (*[0] * before, *dims, *[None] * after))
    return modification


def _weighted(counted: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax(counted) · value, the logarithm of each row's sum (0 if nothing counts), and its maximum."""
    weights, logarithm, largest = weights_of(counted, guarded=True)
    return weights.to(value.dtype) @ value, logarithm, largest


class _FlexContext(Protocol):
    """The context that PyTorch hands from forward to backward."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _Weighted(torch.autograd.Function):
    """`_weighted` with an analytic gradient; the maximum has none."""

    @staticmethod
    def forward(counted: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _weighted(counted, value)

    @staticmethod
    def setup_context(ctx: _FlexContext, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*inputs, *output[:2])

    @staticmethod
    def backward(
        ctx: _FlexContext, grad: Tensor | None, of_logarithm: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        counted, value, result, logarithm = ctx.saved_tensors
        weights = torch.exp(counted - logarithm)
        shift = torch.zeros_like(logarithm) if of_logarithm is None else of_logarithm
        if grad is None:
            return weights * shift, None
        row_dots = (grad.to(weights.dtype) * result.to(weights.dtype)).sum(-1, keepdim=True)
        score_grads = weights * ((grad @ value.mT).to(weights.dtype) - (row_dots - shift))
        return score_grads, weights.to(grad.dtype).mT @ grad


__all__ = ["decompose_flex_attention"]
