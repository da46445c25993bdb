"""Blocks that a loop in C skips because of values in memory, against the evaluator."""

from __future__ import annotations

import pytest
import torch

from fusion.codegen.c.target import CTarget
from fusion.lowering.ir.kernel import Kernel
from tests.codegen.kernels.making import assert_same, expected
from tests.codegen.kernels.masked import DOCUMENTS, MASKS, WALKS, given, masked

TARGET = CTarget()
SIZES = (1, 450, 500)  # in blocks of at most 192


def run(kernel: Kernel, tensors: list[torch.Tensor]) -> None:
    TARGET.build(kernel, TARGET.emit(kernel))(*tensors)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("loop", WALKS)
def test_masks_in_memory(loop: str, mask: str) -> None:
    kernel = masked(loop, mask, SIZES)
    assert ") continue;" in TARGET.emit(kernel)
    ids = torch.arange(500) // 150 if mask != "no document twice in a row" else torch.arange(500) // 400
    tensors = given(kernel, SIZES, ids)
    want = expected(kernel, tensors)
    run(kernel, tensors)
    assert_same(kernel, tensors, want)


@pytest.mark.parametrize("ids", DOCUMENTS)
def test_documents_in_any_order(ids: str) -> None:
    kernel = masked("forward", "causal documents", SIZES)
    tensors = given(kernel, SIZES, DOCUMENTS[ids](500))
    want = expected(kernel, tensors)
    run(kernel, tensors)
    assert_same(kernel, tensors, want)


def test_other_documents_are_not_read() -> None:
    sizes = (1, 576, 576)
    kernel = masked("forward", "documents", sizes)
    tensors = given(kernel, sizes, torch.arange(576) // 192)
    value, out = tensors[-2:]
    value[:, 192:384] = float("nan")
    run(kernel, tensors)
    seen = out.isfinite().all(-1)[0]
    # Blocks of rows are 192 or less, by the number of threads: the ends belong to one document.
    assert seen[:96].all() and seen[568:].all() and not seen[192:384].any()
