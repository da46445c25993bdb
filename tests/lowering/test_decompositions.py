"""The table of what PyTorch takes apart before the rules see it."""

from __future__ import annotations

import torch

from lowering.decompositions import FOR_TRAINING, decompositions
from lowering.registry import RULES

aten = torch.ops.aten


def test_nothing_with_a_rule_is_taken_apart():
    exceptions = {getattr(packet, name) for packet in FOR_TRAINING for name in packet.overloads()}
    assert decompositions().keys() & RULES.keys() <= exceptions


def test_composites_without_a_rule_are():
    for target in (
        aten.native_batch_norm_backward.default,
        aten._native_batch_norm_legit_functional.default,
        aten.nll_loss_forward.default,
        aten.huber_loss.default,
        aten.upsample_nearest2d.default,
    ):
        assert target in decompositions()


def test_library_calls_stay_whole():
    for target in (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten.embedding_dense_backward.default,
        aten.convolution.default,
    ):
        assert target not in decompositions()


def test_it_is_made_once():
    assert decompositions() is decompositions()
