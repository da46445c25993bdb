"""Gradients of gradients on a device: with the random numbers of the call."""

from __future__ import annotations

import pytest
import torch

import fusion

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_second_derivatives_drop_the_elements_of_the_call(mode: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x.sin(), 0.5) * torch.nn.functional.dropout(x, 0.3)

    fused = fusion.fuse(f, mode=mode, options={"strict": True})
    x = torch.linspace(1, 2, 600, device="cuda", dtype=torch.float64).view(3, 200).requires_grad_()
    for _ in range(4):  # under CUDA graphs the first calls are recorded, later ones played again
        torch.compiler.cudagraph_mark_step_begin()
        out = fused(x)
        kept = (out.detach() != 0).double() / (0.5 * 0.7)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x)
        expected = kept * (2 * x.cos() - x * x.sin()).detach()
        torch.testing.assert_close(second, expected)
        assert 0.2 < float((kept != 0).double().mean()) < 0.5
