"""With fake tensors a fused function runs its operations; observers of operations see eager's."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fusion
from fusion.compilation.autograd import aot_backend
from fusion.runtime import Boxed
from tests.fusion.capabilities import of_everything


def test_fake_inputs():
    fused = fusion.fuse(lambda x: torch.softmax(x * 2, -1), options={"strict": True})
    x = torch.randn(4, 6)
    with pytest.warns(fusion.FusionWarning, match="no memory"):
        got = fused(FakeTensorMode().from_tensor(x))
    assert isinstance(got, FakeTensor) and got.shape == (4, 6)
    torch.testing.assert_close(fused(x), torch.softmax(x * 2, -1))
    first, second = fusion.report(fused).graphs
    assert "no memory" in first.failure and second.kernels


def test_fake_results():
    fused = fusion.fuse(lambda n: torch.ones(n) * 2, options={"strict": True})
    torch.testing.assert_close(fused(7), torch.full((7,), 2.0))
    for _ in range(2):
        with FakeTensorMode():
            got = fused(7)
        assert isinstance(got, FakeTensor) and got.shape == (7,)
    torch.testing.assert_close(fused(7), torch.full((7,), 2.0))
    assert ["called" in graph.label for graph in fusion.report(fused).graphs] == [False, True]


def test_fake_gradients_of_real_weights():
    net = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU())
    fused = fusion.fuse(net, options={"strict": True})
    x = torch.randn(4, 6)
    expected = fused(x)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        got = fused(mode.from_tensor(x))
        (gradient,) = torch.autograd.grad(got.sum(), net[0].weight)
    assert isinstance(got, FakeTensor) and got.shape == (4, 5)
    assert isinstance(gradient, FakeTensor) and gradient.shape == (5, 6)
    torch.testing.assert_close(fused(x), expected)


def test_flops_are_counted_as_in_eager():
    net = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))
    fused, x = fusion.fuse(net), torch.randn(4, 6)
    fused(x).sum().backward()
    counts = []
    for call in (net, fused):
        with FlopCounterMode(display=False) as counter:
            call(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_the_compilers_own_tensors_are_real() -> None:
    """Trials of online forms compute with numbers: neither fake nor decomposed in Python, unlike traced tensors."""
    seen: list[tuple[bool, bool]] = []

    def compile_one(graph: fx.GraphModule, label: str) -> Boxed:
        fake = isinstance(torch.ones(3), FakeTensor)
        python = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)
        seen.append((fake, python))
        return lambda inputs: graph(*inputs)

    x = torch.randn(5, requires_grad=True)
    torch.compile(lambda x: x.exp().sum(), backend=aot_backend(compile_one, of_everything))(x).backward()
    assert seen == [(False, False)] * 2
