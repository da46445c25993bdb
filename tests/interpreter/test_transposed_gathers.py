"""Rows that are read along and across by one kernel: a block of several rows takes whole sectors of both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusion
from tests.golden.programs import relative_softmax


def drawn(heads: int, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores, near, far = (torch.randn(heads, rows, n, generator=generator).to(dtype) for n in (rows, width, width))
    distances = torch.arange(rows)[:, None] - torch.arange(rows)
    return scores, near, far, (distances / 2).ceil()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "rows", "width"), [(3, 37, 40), (2, 64, 17)])
def test_numbers_and_blocks(heads: int, rows: int, width: int, dtype: torch.dtype) -> None:
    given = drawn(heads, rows, width, dtype)
    function = fusion.fuse(relative_softmax, options={"target": "triton"})
    exact = relative_softmax(*(each.double() for each in given))
    error, bound = ((run(*given).double() - exact).norm() for run in (function, relative_softmax))
    assert error <= 2 * bound + 1e-6 * exact.norm()
    (kernel,) = fusion.report(function).kernels
    assert "tl.arange(0, XBLOCK)" in kernel.source and "[None, :]" in kernel.source
