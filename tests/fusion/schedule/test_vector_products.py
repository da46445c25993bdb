"""Products that become sums of vectors where these are predicted to take no longer than the library's products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusion.codegen.c.device import EPYC
from fusion.codegen.c.target import CTarget
from fusion.codegen.target import Capabilities
from fusion.inspect.examples import lowered
from fusion.schedule.rewrites.vector_products import of_few_rows


@pytest.fixture
def capabilities() -> Capabilities:
    """A CPU whose products are five times as fast as its additions, with packing that is dear beside few rows."""
    return replace(CTarget().capabilities, rates=replace(EPYC, threads=1).rates)


def becomes_sum(capabilities: Capabilities, rows: int, columns: int, depth: int, dtype: torch.dtype) -> bool:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.t()

    given = torch.empty(rows, depth, dtype=dtype), torch.empty(columns, depth, dtype=dtype)
    return bool(of_few_rows(lowered(program, *given), capabilities))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_are_summed_while_packing_would_take_longer(capabilities: Capabilities, dtype: torch.dtype) -> None:
    assert becomes_sum(capabilities, 1, 2048, 1024, dtype) and becomes_sum(capabilities, 4, 2048, 1024, dtype)
    assert not becomes_sum(capabilities, 17, 2048, 1024, dtype)  # more than registers hold


def test_rows_that_leave_the_nearest_cache_are_left_to_products(capabilities: Capabilities) -> None:
    assert not becomes_sum(capabilities, 16, 128, 4096, torch.float32)
    assert becomes_sum(capabilities, 16, 512, 512, torch.float32)


def test_a_factor_that_is_as_large_as_the_matrix_is_not_rearranged(capabilities: Capabilities) -> None:
    program = lowered(lambda x, w: x @ w, torch.empty(16, 32768), torch.empty(32768, 16))
    assert not of_few_rows(program, capabilities)


def test_weights_that_are_computed_are_not_stored_first(capabilities: Capabilities) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.float().t()

    narrow = lowered(program, torch.empty(16, 1024), torch.empty(2048, 1024, dtype=torch.int8))
    assert of_few_rows(narrow, capabilities) and not of_few_rows(narrow, replace(capabilities, few_rows=0))
