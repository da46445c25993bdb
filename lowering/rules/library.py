"""What is left to the library on purpose, and why: these calls are neither lowered nor taken apart."""

from __future__ import annotations

import torch
from torch._ops import OpOverloadPacket

from lowering.builder import Builder
from lowering.errors import Unsupported
from lowering.registry import RULES, lowers
from lowering.rules.promotion import overloads
from lowering.value import Value

aten = torch.ops.aten

REASONS: dict[str, tuple[OpOverloadPacket, ...]] = {
    "convolutions are the library's": (aten.convolution, aten.convolution_backward),
    "pooling is the library's": (
        *(aten.avg_pool2d, aten.avg_pool2d_backward, aten.avg_pool3d, aten.avg_pool3d_backward),
        *(aten._adaptive_avg_pool2d, aten._adaptive_avg_pool2d_backward),
        *(aten._adaptive_avg_pool3d, aten._adaptive_avg_pool3d_backward),
        *(aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward),
        *(aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward),
        *(aten.adaptive_max_pool2d, aten.adaptive_max_pool2d_backward),
        *(aten.adaptive_max_pool3d, aten.adaptive_max_pool3d_backward),
        *(aten.max_unpool2d, aten.max_unpool3d),
    ),
    "attention that was asked for in one piece is the library's": (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_efficient_attention_backward,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_cudnn_attention_backward,
        aten._scaled_dot_product_fused_attention_overrideable,
        aten._scaled_dot_product_fused_attention_overrideable_backward,
    ),
    "a scan carries a value along its dimension": (
        *(aten.cumsum, aten.cumprod, aten.cummax, aten.cummin, aten.logcumsumexp),
    ),
    "a sort or a selection by rank": (
        *(aten.sort, aten.topk, aten.kthvalue, aten.median, aten.nanmedian, aten.mode, aten.searchsorted),
        *(aten.bucketize,),
    ),
    "a scatter in which sources may meet": (
        *(aten.index_put, aten.index_add, aten.index_copy, aten.index_fill, aten.index_reduce),
        *(aten.scatter_reduce, aten.put, aten.masked_scatter),
        *(aten.embedding_dense_backward, aten.unfold_backward, aten.col2im),
    ),
    "the size of the result depends on the contents": (aten.nonzero, aten.masked_select),
    "uninitialised memory has no value": (aten.empty, aten.empty_permuted, aten.empty_strided),
    "a distribution that is drawn by rejection or in sequence": (
        *(aten.randint, aten.randint_like, aten.randperm, aten.multinomial, aten.exponential),
        *(aten.geometric, aten.cauchy, aten.log_normal, aten.poisson, aten.binomial),
    ),
    "PyTorch's parts of it round unlike eager": (aten.linspace,),
    "its parts would be library calls again": (aten._euclidean_dist, aten._chunk_cat),
}
"""Why → which.  Overloads that have a rule elsewhere keep it."""


def _refuse(packet: OpOverloadPacket, reason: str) -> None:
    @lowers(*(target for target in overloads(packet) if target not in RULES))
    def rule(ctx: Builder, *args: object, **kwargs: object) -> Value:
        raise Unsupported(reason)


for _reason, _packets in REASONS.items():
    for _packet in _packets:
        _refuse(_packet, _reason)
