"""Numbers of the host in programs of a device."""

from __future__ import annotations

import pytest
import torch

import fusion

pytestmark = pytest.mark.gpu


def test_numbers_of_the_host_do_not_part_kernels() -> None:
    def f(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        masked = torch.where(x > 0, x * s, torch.tensor(-1e4)) / torch.sqrt(torch.tensor(64.0))
        return masked.masked_fill(x > 1, torch.tensor(float("-inf"))).softmax(-1) * torch.full([], 3)

    fused = fusion.fuse(f, options={"strict": True})
    for number in (2.0, 0.25):
        x, s = torch.randn(33, 65, device="cuda"), torch.tensor(number, dtype=torch.float64)
        torch.testing.assert_close(fused(x, s), f(x, s))
    report = fusion.report(fused)
    assert len(report.kernels) == 1 and all("_to_copy" in extern.name for extern in report.externs)


def test_gradients_with_numbers_of_the_host() -> None:
    def f(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x * s, torch.tensor(0.1)).exp().sum()

    x, s = torch.randn(33, 65, device="cuda", requires_grad=True), torch.tensor(0.5)
    expected = torch.autograd.grad(f(x, s), x)
    torch.testing.assert_close(torch.autograd.grad(fusion.fuse(f, options={"strict": True})(x, s), x), expected)
