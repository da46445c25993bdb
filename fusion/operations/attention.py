"""Calls cuDNN's backward of attention with the right strides of the gradient of the result.

PyTorch keeps one cuDNN graph for each shape and layout of queries, keys, values and mask.  The strides of the gradient
of the result are part of a backward graph and not of its key, so that a second layout of that gradient is read with the
strides of the first (`MHAParams` in ATen's `cudnn/MHA.cpp`; PyTorch 2.11 on an H100, 16-bit floats: an error of 1.2 to
1.5 of the norm of the gradients, at every shape tried, with and without a mask, also in eager).
"""

from __future__ import annotations

import torch
from torch import Tensor

_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def cudnn_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `query`, `key` and `value`, as the ATen operation with these arguments defines them.

    The gradient of the result gets the strides of the result, which follow from those of the query: one layout for each
    key of this process.  Eager may have used another layout under the same key.  Without dropout the probability is
    passed as −0.0, which means the same and makes another key.
    """
    if grad_out.stride() != out.stride():
        grad_out = torch.empty_like(out).copy_(grad_out)
    operands = grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias
    lengths = cum_seq_q, cum_seq_k, max_q, max_k
    gradients: tuple[Tensor, Tensor, Tensor] = _backward(*operands, *lengths, dropout_p or -0.0, is_causal, scale=scale)
    return gradients
