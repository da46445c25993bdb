"""Kernels that scale in place, under Triton's interpreter: fewer programs than blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.codegen.triton import target
from fusion.codegen.triton.devices.h200 import H200
from fusion.joint import loss_gradients
from fusion.schedule.launches import reuse


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_block_is_scaled_once(dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "H200", replace(H200, multiprocessors=1))
    monkeypatch.setattr(loss_gradients, "LARGE", 1 << 12)
    monkeypatch.setattr(reuse, "LEAST_BYTES", 1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x, y)

    x, y = (torch.randn(301, 50, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))

    def gradient(run: object, kind: torch.dtype) -> Tensor:
        leaf = x.to(kind).requires_grad_()
        assert callable(run)
        return torch.autograd.grad(run(leaf, y.to(kind)) * scale, leaf)[0]

    function = fusion.fuse(loss, options={"target": "triton"})
    exact = gradient(loss, torch.float64)
    error, bound = ((each.double() - exact).norm() for each in (gradient(function, dtype), gradient(loss, dtype)))
    assert error <= 2 * bound + 1e-6 * exact.norm()
    assert any("for block in range(tl.program_id(0)" in kernel.source for kernel in fusion.report(function).kernels)
