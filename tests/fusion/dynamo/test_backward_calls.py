"""Backward that is called within a function that Dynamo traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor
from torch._dynamo.convert_frame import ConvertFrame

import fusion


def gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((x * weight).sin().sum(), (x, weight))


def test_the_compiler_is_not_traced_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph break leaves the call of backward to eager, but what it calls would be traced."""
    traced: list[str] = []
    trace: Callable[..., object] = ConvertFrame.__call__

    def tracing(self: ConvertFrame, frame: FrameType, *rest: object, **named: object) -> object:
        traced.append(frame.f_code.co_filename)
        return trace(self, frame, *rest, **named)

    monkeypatch.setattr(ConvertFrame, "__call__", tracing)
    x, weight = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    fused = fusion.fuse(gradients, options={"strict": True, "graph_cache": False})
    exact = gradients(*(each.detach().double().requires_grad_() for each in (x, weight)))
    for mine, wanted in zip(fused(x, weight), exact, strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-5)
    assert fusion.report(fused).kernels
    assert __file__ in traced
    own = Path(fusion.__file__).parent
    assert not [name for name in traced if own in Path(name).parents]
