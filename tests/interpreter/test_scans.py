"""Loops that skip blocks by values in memory, under Triton's interpreter, against the evaluator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion.codegen.triton import Config, TritonTarget
from fusion.lowering.ir.kernel import Kernel
from tests.codegen.kernels.making import assert_same, expected
from tests.codegen.kernels.masked import DOCUMENTS, EACH, MASKS, WALKS, given, masked

TARGET = TritonTarget()
BLOCKS = Config((("m", 32), ("k", 16), ("n", 16), ("r", 16)))


def run(kernel: Kernel, tensors: list[torch.Tensor], config: Config) -> str:
    source = TARGET.emit(kernel, config)
    TARGET.build(kernel, source)(*tensors)
    return source


@pytest.mark.parametrize("split", [False, True], ids=["one loop", "split"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("loop", WALKS)
def test_masks_in_memory(loop: str, mask: str, split: bool) -> None:
    for sizes in ((2, 96, 128), (2, 150, 90)):
        kernel = masked(loop, mask, sizes)
        tensors = given(kernel, sizes)
        want = expected(kernel, tensors)
        source = run(kernel, tensors, replace(BLOCKS, split=split))
        assert ("_lower" in source) == (loop != "dkv" or mask not in ("lengths", "flags")) and "_upper" in source
        assert_same(kernel, tensors, want)


@pytest.mark.parametrize("split", [False, True], ids=["one loop", "split"])
@pytest.mark.parametrize("loop", WALKS)
def test_a_mask_of_each_score(loop: str, split: bool) -> None:
    """It is read in every block; only the last one, a loop of its own, masks the end of a row."""
    for sizes in ((1, 96, 128), (1, 50, 90)):
        kernel = masked(loop, EACH, sizes)
        tensors = given(kernel, sizes)
        want = expected(kernel, tensors)
        source = run(kernel, tensors, replace(BLOCKS, split=split))
        assert ("_middle" in source) == (split and sizes[1] % 16 > 0)
        assert_same(kernel, tensors, want)


@pytest.mark.parametrize("ids", DOCUMENTS)
def test_documents_in_any_order(ids: str) -> None:
    sizes = (1, 150, 150)
    for loop in WALKS:
        for mask in ("documents", "causal documents"):
            kernel = masked(loop, mask, sizes)
            tensors = given(kernel, sizes, DOCUMENTS[ids](150))
            want = expected(kernel, tensors)
            run(kernel, tensors, replace(BLOCKS, split=True))
            assert_same(kernel, tensors, want)


@pytest.mark.parametrize("split", [False, True], ids=["one loop", "split"])
def test_other_documents_are_not_read(split: bool) -> None:
    sizes = (1, 192, 192)
    kernel = masked("forward", "documents", sizes)
    tensors = given(kernel, sizes, torch.arange(192) // 64)
    value, out = tensors[-2:]
    value[:, 64:128] = float("nan")
    source = run(kernel, tensors, replace(BLOCKS, split=split))
    assert source.count("tl.dot(") == (4 if split else 2)
    seen = out.isfinite().all(-1)[0]
    assert seen[:64].all() and seen[128:].all() and not seen[64:128].any()


def test_rows_that_see_nothing() -> None:
    """Some rows see no key, and some blocks of rows none at all."""
    sizes = (1, 128, 128)
    kernel = masked("forward", "documents", sizes)
    tensors = given(kernel, sizes)
    position = [p.name for p in kernel.params].index("query_ids")
    tensors[position] = torch.where(torch.arange(128) % 3 == 0, 99, tensors[position])
    tensors[position][32:64] = 99
    want = expected(kernel, tensors)
    run(kernel, tensors, replace(BLOCKS, split=True))
    assert want[-1].isnan().any() and want[-1].isfinite().any()
    assert_same(kernel, tensors, want)


def test_a_short_loop_is_not_scanned() -> None:
    kernel = masked("forward", "documents", (1, 128, 128))
    assert "_lower" not in TARGET.emit(kernel, replace(BLOCKS, blocks=(("m", 32), ("k", 16), ("n", 64), ("r", 16))))
