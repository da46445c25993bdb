"""Copies in a joint graph: removed, except those whose memory has other users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch.fx.experimental.proxy_tensor import make_fx

import fusion
from fusion.joint.copies import drop_copies

Function = Callable[..., Any]
clone = torch.ops.aten.clone.default


def copies(function: Function, *args: torch.Tensor) -> int:
    graph = make_fx(function)(*args)
    drop_copies(graph)
    return len(graph.graph.find_nodes(op="call_function", target=clone))


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: (x * 2).clone() + 1, 0),
        (lambda x: (x * 2).clone().clone() + 1, 0),
        (lambda x: torch.native_layer_norm(x, [4], None, None, 1e-5)[0].clone() + 1, 0),
        (lambda x: x.clone() + 1, 1),
        (lambda x: x.view(4, 3).clone() + 1, 1),
        (lambda x: (x * 2).t().clone(memory_format=torch.contiguous_format) + 1, 1),
        (lambda x: (x * 2).split(2, 1)[0].clone() + 1, 1),
        (lambda x: [(y := x * 2), y.clone() + 1], 1),
        (lambda x: [(y := x * 2).view(-1), y.clone() + 1], 1),
        (lambda x: (x * 2).clone(), 1),
        (lambda x: (x * 2).clone().view(-1), 1),
    ],
)
def test_copies_of_computed_tensors_are_removed(function: Function, left: int) -> None:
    assert copies(function, torch.randn(3, 4)) == left


def test_a_dropout_that_drops_nothing_keeps_nothing_twice() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(x @ w), 0.0, training=True) @ w

    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    fused = fusion.fuse(layer, options={"strict": True})
    got = torch.autograd.grad(fused(x, w).sum(), (x, w))
    for result, expected in zip(got, torch.autograd.grad(layer(x, w).sum(), (x, w)), strict=True):
        torch.testing.assert_close(result, expected)
    names = [kernel.name for kernel in fusion.report(fused).kernels]
    assert names and not any("clone" in name for name in names)
