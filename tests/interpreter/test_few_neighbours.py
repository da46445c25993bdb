"""Group norms with channels last: the few channels of a group are parts of their own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("channels", "groups", "side"), [(128, 32, 32), (96, 16, 32), (64, 32, 47)], ids=["even", "six", "ragged"]
)
def test_group_norms(channels: int, groups: int, side: int, dtype: torch.dtype) -> None:
    def normed(x: Tensor, weight: Tensor, bias: Tensor, time: Tensor) -> Tensor:
        return F.silu(F.group_norm(x + time[:, :, None, None], groups, weight, bias))

    torch.manual_seed(0)
    x = (torch.randn(2, channels, side, side) + 30).to(dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(channels, dtype=dtype) for _ in range(2))
    given = x, weight, bias, torch.randn(2, channels, dtype=dtype)
    backend = fusion.Backend(fusion.Options.read(options={"target": "triton", "strict": True}))
    result = torch.compile(normed, backend=backend, dynamic=False)(*given)
    (report,) = backend.reports
    first, *_ = report.kernels
    assert f", {channels // groups}] strides [{channels}, {channels // groups}, {2 * channels}, 1]" in first.source
    exact, eager = normed(*(each.double() for each in given)), normed(*given)
    assert result.stride() == eager.stride()
    assert (result - exact).norm() <= 2 * (eager - exact).norm()
