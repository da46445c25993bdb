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
    assert len(report.kernels) == 1 and not report.externs


def test_floats_that_change_are_passed_by_value() -> None:
    def f(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        return torch.sin(x * a) + b * a

    fused = fusion.fuse(f, dynamic=True, options={"strict": True})
    for rows, a, b in ((5, 0.5, 1e-3), (7, 1 / 3, 2.0), (9, 1e20, 1.0)):
        x = torch.randn(rows, 65, device="cuda", dtype=torch.float64)
        torch.testing.assert_close(fused(x, a, b), f(x, a, b), rtol=1e-12, atol=1e-12)
    report = fusion.report(fused)
    assert not report.externs and {len(graph.kernels) for graph in report.graphs} == {1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool, torch.float64])
def test_numbers_of_any_type(dtype: torch.dtype) -> None:
    def f(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.where(s.bool(), x + s, x), s.to(x.device)

    fused = fusion.fuse(f, options={"strict": True})
    for number in (3, 0):
        x, s = torch.randn(1000, device="cuda"), torch.tensor(number, dtype=dtype)
        for got, want in zip(fused(x, s), f(x, s), strict=True):
            torch.testing.assert_close(got, want)


def test_gradients_with_numbers_of_the_host() -> None:
    def f(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x * s, torch.tensor(0.1)).exp().sum()

    x, s = torch.randn(33, 65, device="cuda", requires_grad=True), torch.tensor(0.5)
    expected = torch.autograd.grad(f(x, s), x)
    torch.testing.assert_close(torch.autograd.grad(fusion.fuse(f, options={"strict": True})(x, s), x), expected)
