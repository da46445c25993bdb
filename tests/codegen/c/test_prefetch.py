"""Rows of tables that a kernel in C fetches before the programs that read them."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.lowering.errors import ElementOutOfRange

ROWS = 5000
"""Of 64 numbers they take 1.2 MiB, more than the L2 cache keeps."""


def text_of(program, *args: torch.Tensor) -> str:
    """Compile a program, compare its result with eager's, and return its only kernel."""
    fused = fusion.fuse(program, options={"target": "c", "strict": True})
    assert torch.allclose(fused(*args), program(*args), atol=1e-5)
    (kernel,) = fusion.report(fused).kernels
    return kernel.source


def embedded(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, table) + 1


def bag(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, table).sum(1)


def normed(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.embedding(ids, table), table.shape[1:])


def subscript(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[ids - 3] * 2


@pytest.mark.parametrize(
    ("program", "shape", "ahead"),
    [
        (embedded, (333,), "imin(332, i0 + 32)"),
        (embedded, (3, 111), "imin(332, i0 + 32)"),
        (bag, (50, 8), "imin(49, i0 + 4)"),  # eight rows in each program
        (bag, (300, 40), "imin(299, i0 + 1)"),
        (normed, (333,), "imin(332, i0 + 32)"),
        (subscript, (333,), "imin(332, i0 + 32)"),  # some numbers are negative
    ],
)
def test_rows_of_a_large_table_are_fetched_some_programs_ahead(program, shape, ahead):
    text = text_of(program, torch.randint(ROWS, shape), torch.randn(ROWS, 64))
    assert ahead in text
    fetched = re.findall(r"for \(int l = 0; l < 64; l \+= 16\) __builtin_prefetch\(\w+ \+ \w+ \+ l, 0, 2\);", text)
    assert len(fetched) == 1


def test_only_the_start_of_a_long_row_is_fetched():
    text = text_of(embedded, torch.randint(500, (70,)), torch.randn(500, 1000, dtype=torch.float64))
    assert "imin(69, i0 + 16)" in text
    assert "l < 128; l += 8" in text


def divided(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[ids // (ids + 1)]


def in_two_steps(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[ids[ids % 100]]


@pytest.mark.parametrize("program", [divided, in_two_steps])
def test_positions_that_may_fail_or_wait_for_data_are_not_computed_ahead(program):
    assert "__builtin_prefetch(" not in text_of(program, torch.randint(ROWS, (333,)), torch.randn(ROWS, 64))


def test_a_table_in_the_cache_is_not_fetched():
    assert "__builtin_prefetch(" not in text_of(embedded, torch.randint(300, (333,)), torch.randn(300, 64))


# Rows that are updated ------------------------------------------------------------------------------------------------


def added(ids: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return table.index_add(0, ids, rows)


def updating(width: int, dtype: torch.dtype = torch.float32) -> str:
    """Return the kernel that adds 333 rows of `width` numbers to rows of a table, after its result was compared."""
    fused = fusion.fuse(added, options={"target": "c", "strict": True})
    args = torch.randint(ROWS, (333,)), torch.randn(ROWS, width, dtype=dtype), torch.randn(333, width, dtype=dtype)
    assert torch.allclose(fused(*args), added(*args), atol=1e-5)
    copied, update = fusion.report(fused).kernels
    assert "__builtin_prefetch" not in copied.source
    return update.source


@pytest.mark.parametrize(("width", "ahead"), [(64, 16), (67, 12), (200, 4)])
def test_rows_to_update_are_fetched_some_iterations_ahead(width, ahead):
    assert f"imin(332, r0 + {ahead})" in updating(width)


def test_a_row_is_tested_once_and_updated_in_lanes():
    """No lane branches: a masked store takes much longer than an addition."""
    _, loop = updating(64).split("if (t")
    assert re.match(r"\d+\)\n +#pragma omp simd\n +for \(int64_t i0 = .*\n +out0\[t\d \+ i0\] = out0", loop)


def test_points_that_may_meet_stay_in_order():
    def summed(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(50, 3).index_put((ids,), values, accumulate=True)

    fused = fusion.fuse(summed, options={"target": "c", "strict": True})
    args = torch.randint(50, (4, 333)), torch.randn(4, 333, 3)
    assert torch.allclose(fused(*args), summed(*args), atol=1e-5)


@pytest.mark.parametrize("wrong", [-ROWS - 1, ROWS])
def test_a_position_outside_of_the_table_is_an_error(wrong):
    fused = fusion.fuse(added, options={"target": "c", "strict": True})
    ids = torch.randint(ROWS, (333,))
    ids[-1] = wrong
    with pytest.raises(ElementOutOfRange, match="out of bounds"):
        fused(ids, torch.randn(ROWS, 64), torch.randn(333, 64))
