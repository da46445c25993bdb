"""Quantised linear layers: what is stored, what is left alone, and that fused results are those of the integers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion
from fusion.quantize import QuantizedLinear, quantized

BF16, F32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(256, 320, bias=False), nn.Linear(256, 320)
        self.down = nn.Linear(320, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_the_numbers_are_within_half_a_step_of_the_weights():
    for bits, group in ((8, None), (8, 32), (4, 32), (4, 64)):
        linear = nn.Linear(128, 24)
        layer = quantized(linear, bits=bits, group=group)
        steps = layer.scale.repeat_interleave(128 // layer.scale.shape[1], 1)
        assert ((layer.numbers(F32) - linear.weight).abs() <= 0.501 * steps).all()
        assert layer.weight.nbytes == 128 * 24 * bits // 8
        assert (layer.in_features, layer.out_features) == (128, 24)


def test_a_row_of_zeros_stays_zero():
    linear = nn.Linear(64, 8, bias=False)
    linear.weight.data[3] = 0
    assert (quantized(linear, bits=4, group=32).numbers(F32)[3] == 0).all()


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 64), (4, 32)], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_fused_block_agrees_with_float64(bits, group, rows, dtype):
    model = fusion.quantize_weights(Block().to(dtype).eval(), bits=bits, group=group)
    assert [type(layer) for layer in model.children()] == [QuantizedLinear] * 3
    wide = copy.deepcopy(model).double()
    fused, x = fusion.fuse(model, options={"strict": True}), torch.randn(rows, 256).to(dtype)
    with torch.no_grad():
        exact, eager, got = wide(x.double()), model(x), fused(x)
    errors = [(result.double() - exact).norm() for result in (got, eager)]
    assert errors[0] <= 2 * errors[1] + 1e-6 * exact.norm()
    kernels = fusion.report(fused).graphs[-1].kernels
    assert kernels
    if rows == 1:
        assert len(kernels) == 2 and all("sums_" in kernel.source for kernel in kernels)


def test_a_saved_state_is_loaded():
    model, other = (fusion.quantize_weights(Block(), bits=4, group=32) for _ in range(2))
    other.load_state_dict(model.state_dict())
    x = torch.randn(3, 256)
    assert torch.equal(model(x), other(x))


def test_gradients_reach_the_input():
    model = fusion.quantize_weights(Block(), bits=8)
    x = torch.randn(3, 256, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    fused = fusion.fuse(model, options={"strict": True})
    (got,) = torch.autograd.grad(fused(x).sum(), x)
    assert {graph.label for graph in fusion.report(fused).graphs if graph.kernels} >= {"forward", "backward"}
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_layers_that_cannot_be_replaced_stay():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.odd, self.head = nn.Embedding(32, 64), nn.Linear(63, 64), nn.Linear(64, 32, bias=False)
            self.own, self.layer = type("Own", (nn.Linear,), {})(64, 64), nn.Linear(64, 64)
            self.head.weight = self.words.weight

    model = fusion.quantize_weights(Tied(), bits=4, group=32)
    replaced = [name for name, layer in model.named_children() if isinstance(layer, QuantizedLinear)]
    assert replaced == ["layer"]


def test_what_cannot_be_quantised_is_refused():
    with pytest.raises(ValueError, match="8 or 4 bits, not 3"):
        fusion.quantize_weights(nn.Sequential(nn.Linear(8, 8)), bits=3)
    with pytest.raises(ValueError, match="rows of 63 weights"):
        quantized(nn.Linear(63, 8), bits=4)
    with pytest.raises(fusion.Unsupported, match="no linear layer has rows of whole groups of 48"):
        fusion.quantize_weights(nn.Sequential(nn.Linear(64, 8)), group=48)
