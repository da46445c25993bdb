"""Lists calls that are left to the library on purpose, with the reason: they are neither lowered nor decomposed."""

from __future__ import annotations

import torch
from torch._ops import OpOverloadPacket

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.registry import RULES, lowers
from fusion.lowering.rules.promotion import overloads
from fusion.lowering.value import Value

aten = torch.ops.aten

REASONS: dict[str, tuple[OpOverloadPacket, ...]] = {
    "convolutions are the library's": (aten.convolution, aten.convolution_backward),
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
    "the size of the result depends on the contents": (aten.nonzero, aten.masked_select),
    "a distribution that is drawn by rejection or in sequence": (*(aten.randperm, aten.poisson, aten.binomial),),
    "its parts would be library calls again": (aten._euclidean_dist,),
}
"""Reason → operations.  Overloads that have a rule elsewhere keep it."""


def _refuse(packet: OpOverloadPacket, reason: str) -> None:
    @lowers(*(target for target in overloads(packet) if target not in RULES))
    def rule(ctx: Builder, *args: object, **kwargs: object) -> Value:
        raise Unsupported(reason)


for _reason, _packets in REASONS.items():
    for _packet in _packets:
        _refuse(_packet, _reason)
