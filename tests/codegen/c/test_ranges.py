"""Ranges of loops in C that a condition leaves, and the width of the row blocks that follows from them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fusion.codegen.c.target import CTarget
from fusion.lowering.ir.kernel import Kernel
from tests.codegen.kernels.attention import online_attention
from tests.codegen.kernels.making import F32, assert_same, expected, tensors
from tests.codegen.kernels.masked import DOCUMENTS, given, masked

TARGET = CTarget()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(kernel: Kernel, inputs: list[torch.Tensor]) -> torch.Tensor:
    TARGET.build(kernel, TARGET.emit(kernel))(*inputs)
    return inputs[-1]


@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
@pytest.mark.parametrize(
    "visible", [{"window": 5}, {"window": 70}, {"window": 300}, {"window": 9, "prefix": 3}], ids=str
)
@pytest.mark.parametrize("sizes", [(2, 389, 389), (1, 70, 453)], ids=str)
def test_windows(sizes: tuple[int, int, int], visible: dict[str, int], hidden: bool) -> None:
    """Windows narrower and wider than a block, of sizes that no block divides."""
    kernel = online_attention(*sizes, 16, dtype=F32, causal=True, hidden=hidden, **visible)
    inputs = tensors(kernel)
    want = expected(kernel, inputs)
    run(kernel, inputs)
    assert_same(kernel, inputs, want)


def test_blocks_are_as_narrow_as_what_they_see() -> None:
    """Of a short window blocks of 64 rows are fastest, and what these do not see is not read."""
    kernel = online_attention(64, 576, 576, 16, dtype=F32, causal=True, window=10)
    inputs = tensors(kernel)
    for operand in inputs[1:3]:
        operand.view(64, 576, 16)[:, 128:320] = float("nan")
    finite = run(kernel, inputs).view(64, 576, 16).isfinite().all(-1).all(0)
    assert finite[:128].all() and finite[384:].all() and not finite[128:320].any()


def test_wide_blocks_share_what_they_all_see() -> None:
    source = TARGET.emit(online_attention(64, 576, 576, 16, dtype=F32))
    assert "i0_step" not in source


@pytest.mark.parametrize("mask", ["documents", "causal documents", "documents or a prefix", "flags", "from a start"])
def test_numbers_along_the_loop_are_looked_up(mask: str) -> None:
    sizes = (1, 450, 500)
    kernel = masked("forward", mask, sizes)
    assert "r2_first" in TARGET.emit(kernel)
    inputs = given(kernel, sizes, DOCUMENTS["in order"](500))
    want = expected(kernel, inputs)
    run(kernel, inputs)
    assert_same(kernel, inputs, want)


def test_numbers_that_are_no_index() -> None:
    """Lengths and starts as large as integers get do not overflow."""
    sizes = (2, 450, 500)
    for mask, extremes in (("lengths", (2**63 - 1, -(2**63))), ("from a start", (2**31 - 1, -(2**31)))):
        kernel = masked("forward", mask, sizes)
        inputs = given(kernel, sizes)
        inputs[0].view(-1)[:2] = torch.tensor(extremes, dtype=inputs[0].dtype)
        want = expected(kernel, inputs)
        run(kernel, inputs)
        assert_same(kernel, inputs, want)


@pytest.mark.parametrize("window", [0, 30, 200])
def test_a_row_has_the_same_bits_whichever_rows_share_its_block(window: int, threads: None) -> None:
    """With more threads blocks are narrower."""
    kernel = online_attention(1, 700, 700, 16, dtype=F32, causal=True, window=window)
    inputs = tensors(kernel)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(run(kernel, inputs).clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
