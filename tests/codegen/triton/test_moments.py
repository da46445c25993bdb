"""Mean and variance of long columns are sums of one loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusion

pytestmark = pytest.mark.usefixtures("without_disassembly")


def loops(dtype: torch.dtype, rows: int = 1 << 16) -> int:
    """The loops over the elements of a part of a column."""

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(x.float(), 0)
        return variance, mean

    export = fusion.export_kernels(moments, torch.empty(rows, 64, dtype=dtype), target="triton", arch="sm_90")
    (part,) = [kernel for kernel in export.kernels if kernel.name.endswith("_part")]
    return part.source.count("for r0 in range")


def test_columns_of_16_bits_are_read_once() -> None:
    assert loops(torch.bfloat16) == loops(torch.float16) == 1


def test_columns_of_32_bits_are_read_twice() -> None:
    """Their variance may not lose bits to an element that is far from the mean."""
    assert loops(torch.float32) == 2


def test_parts_that_end_behind_the_column_are_read_twice() -> None:
    assert loops(torch.bfloat16, (1 << 16) + 1) == 2
