"""Linear layers of a few rows with quantised weights on a device, through `fuse`, against float64."""

from __future__ import annotations

import pytest
import torch

import fusion
from tests.fusion.schedule.test_quantised import LINEARS, error, inputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LINEARS)
def test_few_rows(name: str, dtype: torch.dtype) -> None:
    """For a matrix with enough rows for the matrix units, not a multiple of a block, and for one with fewer."""
    function = LINEARS[name]
    fused = fusion.fuse(function, options={"strict": True}, dynamic=False)
    for m, n, k in ((1, 8457, 384), (1, 520, 1152), (8, 8457, 384), (16, 520, 1152)):
        given = [tensor.cuda() for tensor in inputs(function, m, n, k, dtype=dtype)]
        assert error(fused(*given), function, given) <= 2 * error(function(*given), function, given)
