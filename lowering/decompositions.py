"""Which composite ATen operations PyTorch's own reference decompositions take apart before the rules see them.

What leaves is the table for AOTAutograd or `make_fx`.  An operation with a rule is never taken apart: a rule of our own
gives fewer nodes, rounds halves once, and knows the shape of the result.  Nor is one whose parts would be library
calls again, or that the library does better in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload, OpOverloadPacket

from lowering import rules
from lowering.registry import RULES

assert rules.__all__, "importing the rules registers them"

aten = torch.ops.aten

ALSO: tuple[OpOverloadPacket, ...] = (
    # batch norms, down to var_mean and pointwise work
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update,
    aten.batch_norm_backward,
    # resampling, down to gathers
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
    aten.upsample_bilinear2d,
    aten.upsample_trilinear3d,
    # the rest
    aten.dist,
    aten.rrelu_with_noise_backward,
    aten.special_ndtr,
    aten.tril_indices,
    aten.triu_indices,
)
"""Taken apart although not among PyTorch's core decompositions."""

WHOLE: tuple[OpOverloadPacket, ...] = (
    aten._scaled_dot_product_flash_attention_for_cpu,  # the library's fused attention
    aten.embedding_dense_backward,  # an accumulating scatter, one library call either way
    aten.index_add,
    aten.index_copy,
    aten.index_fill,
    aten.unfold_backward,
    aten.col2im,
    aten.max_unpool2d,
    aten.max_unpool3d,
    aten._euclidean_dist,
    aten._chunk_cat,
    aten.linspace,  # of integers or between tensors: PyTorch's parts round unlike eager
)
"""Left whole although PyTorch would take them apart."""


@lru_cache(maxsize=1)
def decompositions() -> dict[OpOverload, Callable[..., object]]:
    """Overload → decomposition.  The same dict each time; do not change it."""
    table = {**core_aten_decompositions(), **get_decompositions(ALSO)}
    return {
        target: parts
        for target, parts in table.items()
        if isinstance(target, OpOverload) and target not in RULES and target.overloadpacket not in WHOLE
    }
