"""`accuracy` on a device: each launch is compared, and is as exact as its dtypes."""

from __future__ import annotations

import pytest
import torch

import fusion

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_that_are_right_are_as_exact_as_their_dtypes(dtype: torch.dtype) -> None:
    """Forward and backward of a block with products, a norm and attention."""
    model = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True, device="cuda", dtype=dtype)
    report = fusion.accuracy(model)(torch.randn(4, 96, 128, device="cuda", dtype=dtype))
    assert any("backward" in launch.kernel for launch in report.launches)
    assert all(launch.error <= 2 * launch.rounding + 1e-5 for launch in report.launches), str(report)
