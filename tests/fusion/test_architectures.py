"""Real architectures: forward and one training step as eager, and nearly everything inside generated kernels."""

from __future__ import annotations

import copy

import pytest
import torch

import fusion
from tests.fusion.architectures import ARCHITECTURES, build

TOLERANCE = 1e-6
GRADIENT_TOLERANCE = {"swin": 2e-6}
"""Where TOLERANCE is not met: the gradient of Swin's patch bias is 1.6e-6 off (eager 0.2e-6).  It sums over all patches
what layer norm's backward gives, and our formula rounds each row's mean once for all its channels."""
LIBRARY = ("mm", "bmm", "addmm", "baddbmm", "convolution", "scaled_dot_product", "embedding_dense_backward")
"""Extern calls that are neither pointwise nor reductions: products, convolutions, attention, scatters."""
SCATTERS = ("index_put", "scatter", "max_pool", "cumsum", "sort", "randint")


def training_step(model: torch.nn.Module, inputs: dict[str, object]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The first output and the gradients of a smooth function of it."""
    model.zero_grad(set_to_none=True)
    result = model(**inputs)[0]
    weights = torch.linspace(-1, 1, result.numel()).to(result.dtype).view(result.shape)
    ((result * weights).sum() / result.numel() ** 0.5).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return result.detach(), gradients


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_architecture(name: str) -> None:
    model, inputs = build(name)
    exact_model = copy.deepcopy(model).double()
    exact_inputs = {
        key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
    fused = fusion.fuse(copy.deepcopy(model), options={"strict": True})
    result, gradients = training_step(model, inputs)
    exact, exact_gradients = training_step(exact_model, exact_inputs)
    got, got_gradients = training_step(fused, inputs)

    assert distance(got, exact) <= 2 * distance(result, exact) + TOLERANCE
    for key in got_gradients.keys() - gradients.keys():  # of what the loss does not depend on: zero instead of none
        assert not got_gradients[key].any(), key
    for key, gradient in gradients.items():
        allowed = 2 * distance(gradient, exact_gradients[key]) + GRADIENT_TOLERANCE.get(name, TOLERANCE)
        assert distance(got_gradients[key], exact_gradients[key]) <= allowed, key

    for graph in fusion.report(fused).graphs:
        assert graph.kernels, f"the {graph.label} graph generated nothing"
        strange = [e for e in graph.externs if not any(word in e.name for word in (*LIBRARY, *SCATTERS))]
        assert graph.operations >= 0.9 * (graph.operations + len(strange)), str(graph)
