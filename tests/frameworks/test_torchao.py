"""torchao: quantised weights are read as they are stored, and training with fake quantisation agrees with eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fusion
from tests.frameworks.training import model

pytest.importorskip("torchao")
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_


@pytest.mark.parametrize("rows", [1, 6])
def test_a_layer_with_quantised_activations(rows: int) -> None:
    """From the same activations the same integers are made, so that results agree as closely as in floats."""
    layer = torch.nn.Sequential(torch.nn.Linear(64, 48)).eval()
    quantize_(layer, Int8DynamicActivationInt8WeightConfig())
    fused = fusion.fuse(layer, options={"strict": True})
    with torch.no_grad():
        for _ in range(10):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(fused(x), layer(x), rtol=1e-5, atol=1e-5)
    assert fusion.report(fused).kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig])
def test_quantised_linear_layers(config: Any, dtype: torch.dtype) -> None:
    network = model(width=64).to(dtype).eval()
    x = torch.randn(6, 64, dtype=dtype)
    with torch.no_grad():
        exact = network(x)
        quantize_(network, config())
        fused = fusion.fuse(network, options={"strict": True})
        # A last bit before a quantised activation may move it by one step of 127.
        steps = dtype is torch.bfloat16 or config is Int8DynamicActivationInt8WeightConfig
        close = {"rtol": 5e-2, "atol": 5e-2} if steps else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(fused(x), network(x), **close)
        torch.testing.assert_close(fused(x), exact, rtol=0.1, atol=0.1)
    graph = fusion.report(fused).graphs[-1]  # those before are of other weights
    assert graph.kernels
    if config is Int8WeightOnlyConfig:
        assert not graph.externs
        wide = 64 * 128 * dtype.itemsize  # of one weight of a block
        products = [kernel for kernel in graph.kernels if "mm" in kernel.name]
        assert products and min(kernel.bytes_read for kernel in products) < wide


def test_a_copy_of_quantised_weights_is_fused_alike() -> None:
    network = model(width=64).float().eval()
    quantize_(network, Int8WeightOnlyConfig())
    fused = fusion.fuse(network, options={"strict": True})
    copied, x = copy.deepcopy(fused), torch.randn(6, 64)
    with torch.no_grad():
        torch.testing.assert_close(copied(x), fused(x), rtol=0, atol=0)
    assert fusion.report(copied).kernels
