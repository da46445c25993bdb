"""Which operations of a captured graph PyTorch cannot trace without data."""

from __future__ import annotations

import operator
import threading
from typing import ClassVar

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fusion.dynamo.untraceable import untraceable


class Looks(torch.autograd.Function):
    """Its backward reads a data-dependent size."""

    threads: ClassVar[list[threading.Thread]] = []

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        Looks.threads.append(threading.current_thread())
        return grad * 2 if grad.shape[0] * 3 > 7 else grad


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_backward_is_traced_in_this_thread_and_leaves_no_guards(device: str) -> None:
    """Autograd uses another thread for a device, without the tracing state of its caller."""
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(shape_env=shapes)
    symbolic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    rows = mode.from_tensor(torch.empty(5, 4), symbolic_context=symbolic).shape[0]
    with mode:
        x, v = torch.empty(rows, 4, device=device), torch.empty(3, device=device)
        mask = torch.empty(rows, 4, dtype=torch.bool, device=device)
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("x", "mask", "v")]
    for node, value in zip(given, (x.requires_grad_(), mask, v.requires_grad_()), strict=True):
        node.meta["example_value"] = value
    looked = graph.call_function(Looks.apply, (given[0],))
    looked.meta["example_value"] = x
    written = graph.call_function(operator.setitem, (looked, *given[1:]))
    graph.output(looked)
    before = list(shapes.guards)
    Looks.threads.clear()
    result = untraceable(fx.GraphModule(torch.nn.Module(), graph))
    assert list(result) == [written]
    assert "nonzero" in str(result[written])
    assert Looks.threads == [threading.current_thread()]
    assert shapes.guards == before
