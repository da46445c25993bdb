"""Mean and variance of long columns and rows are sums of one loop."""

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


def walks_of_rows(dtype: torch.dtype, columns: int = 1 << 16) -> int:
    """The loops of a norm of rows that no program holds, with the loop that stores it."""

    def norm(x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[1:])

    export = fusion.export_kernels(norm, torch.empty(512, columns, dtype=dtype), target="triton", arch="sm_90")
    (kernel,) = export.kernels
    return kernel.source.count("for r")


def test_rows_of_16_bits_are_read_once_for_their_moments() -> None:
    assert walks_of_rows(torch.bfloat16) == walks_of_rows(torch.float16) == 2


def test_rows_of_32_bits_are_read_twice_for_their_moments() -> None:
    assert walks_of_rows(torch.float32) == 3


def test_the_variance_of_one_product_is_no_fused_multiply_add() -> None:
    """It is 0, and its estimate with one degree of freedom less is NaN, however the product is rounded."""

    def variances(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * x).var(0, correction=0), (x * x).std(0)

    export = fusion.export_kernels(variances, torch.empty(1, 64), target="triton", arch="sm_90")
    (kernel,) = export.kernels
    assert "sub = mul - mul" in kernel.source and '"enable_fp_fusion": False' in kernel.source
