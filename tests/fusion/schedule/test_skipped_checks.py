"""Checks in blocks that a mask excludes for all rows: they fail as in eager, although the loop skips these blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.lowering.errors import IndexOutOfRange

ROWS, COLUMNS, WIDTH = 600, 1200, 16
TABLE = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1))
QUERIES = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
PLACES = torch.randint(0, 50, (COLUMNS,), generator=torch.Generator().manual_seed(3))
LENGTH = torch.tensor(ROWS)
HALF = torch.arange(COLUMNS) < ROWS


def weighted(scores: Tensor, mask: Tensor, keys: Tensor) -> Tensor:
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ keys


def by_rows(q: Tensor, table: Tensor, at: Tensor) -> Tensor:
    keys = table[at]
    near = torch.arange(COLUMNS) <= torch.arange(q.shape[0])[:, None]
    return weighted(q @ keys.t(), near, keys)


def by_data(q: Tensor, table: Tensor, at: Tensor) -> Tensor:
    keys = table.index_select(0, at)
    return weighted(q @ keys.t(), HALF.expand(q.shape[0], COLUMNS), keys)


def by_two(q: Tensor, table: Tensor, at: Tensor) -> Tensor:
    keys = F.embedding(at, table)
    return weighted(q @ keys.t(), HALF, table[at.flip(0)] * 2)


def by_length(q: Tensor, table: Tensor, at: Tensor) -> Tensor:
    keys = table[at]
    return weighted(q @ keys.t(), torch.arange(COLUMNS) < LENGTH, keys)  # as a cache counts what it holds


def by_call(q: Tensor, table: Tensor, at: Tensor) -> Tensor:
    keys = table[at].view(1, 1, COLUMNS, WIDTH)
    return F.scaled_dot_product_attention(q.view(1, 1, -1, WIDTH), keys, keys, is_causal=True)


def check(function: Callable[..., Tensor], *, dynamic: bool = False) -> None:
    fused = fusion.fuse(function, dynamic=dynamic)
    torch.testing.assert_close(fused(QUERIES, TABLE, PLACES), function(QUERIES, TABLE, PLACES), rtol=1e-4, atol=1e-4)
    for number, beyond in ((-1, 50), (COLUMNS - 100, 1 << 40), (0, -51)):
        wrong = PLACES.clone()
        wrong[number] = beyond
        with pytest.raises(IndexError) as expected:
            function(QUERIES, TABLE, wrong)
        with pytest.raises(IndexOutOfRange) as raised:
            fused(QUERIES, TABLE, wrong)
        assert isinstance(raised.value, IndexError)
        message, place = str(raised.value).splitlines()[:2]
        assert message == str(expected.value) and "test_skipped_checks.py" in place
    torch.testing.assert_close(fused(QUERIES, TABLE, PLACES), function(QUERIES, TABLE, PLACES), rtol=1e-4, atol=1e-4)


def test_places_in_skipped_blocks_are_refused() -> None:
    check(by_rows)


@pytest.mark.parametrize(
    ("function", "dynamic"), [(by_data, True), (by_two, False), (by_length, False), (by_call, False)]
)
def test_places_are_refused_whatever_skips_them(function: Callable[..., Tensor], dynamic: bool) -> None:
    check(function, dynamic=dynamic)


def test_layers_share_the_check_and_loops_without_a_mask_need_none() -> None:
    def layers(q: Tensor, table: Tensor, at: Tensor) -> Tensor:
        return by_rows(by_rows(q, table, at), table, at)

    def unmasked(q: Tensor, table: Tensor, at: Tensor) -> Tensor:
        keys = table[at]
        return (q @ keys.t()).softmax(-1) @ keys

    for function, count in ((layers, 1), (unmasked, 0)):
        report = fusion.explain(function)(QUERIES, TABLE, PLACES)
        assert any("matmul" in kernel.name for kernel in report.kernels)
        assert sum("checks" in kernel.name for kernel in report.kernels) == count
