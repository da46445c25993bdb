"""Decoding in parts in generated Triton, under Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

import fusion
from tests.fusion.agreement import assert_as_eager
from tests.fusion.schedule.test_partial_reductions import attend, check, decoding, kernels, repeated, with_symbolic_keys


@pytest.mark.parametrize(("keys", "dtype"), [(1024, torch.float32), (1111, torch.bfloat16)])
def test_one_query_for_each_head(keys: int, dtype: torch.dtype) -> None:
    given = decoding(4, 4, keys, dtype)
    assert len(kernels(attend, *given, target="triton")) == 2
    check(attend, *given, target="triton")


def test_grouped_heads_with_ragged_lengths() -> None:
    """One batch is mostly masked out, another entirely."""
    given = decoding(4, 2, 1111, torch.bfloat16, batch=3)
    mask = torch.arange(1111).view(1, 1, 1, 1111) < torch.tensor([1100, 70, 0]).view(3, 1, 1, 1)
    check(repeated, *given, mask, target="triton")


def test_a_symbolic_number_of_keys() -> None:
    fused = fusion.fuse(attend, options={"target": "triton", "strict": True})
    given = with_symbolic_keys(decoding(4, 4, 1111))
    assert_as_eager(fused(*given), attend(*given), attend(*(x.double() for x in given)))
