"""Real architectures: forward and one training step as eager, and nearly everything inside generated kernels."""

from __future__ import annotations

import copy

import pytest
import torch

import fusion
from tests.fusion.architectures import ARCHITECTURES, SLOW, build, in_double

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-6
GRADIENT_TOLERANCE = {"swin": 2e-6}
"""Tolerances other than TOLERANCE: the gradient of Swin's patch bias is 1.6e-6 off (eager 0.2e-6).  It sums the results
of layer norm's backward over all patches, and our formula rounds each row's mean once for all its channels.
"""
LIBRARY = ("mm", "bmm", "addmm", "baddbmm", "convolution", "scaled_dot_product", "embedding_dense_backward")
"""Extern calls that are neither pointwise nor reductions: products, convolutions, attention, scatters."""
SCATTERS = ("index_put", "scatter", "max_pool", "sort", "randint")


def training_step(model: torch.nn.Module, inputs: dict[str, object]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The first output and the gradients of a smooth function of it."""
    model.zero_grad(set_to_none=True)
    result = model(**inputs)[0]
    weights = torch.linspace(-1, 1, result.numel(), device=result.device).to(result.dtype).view(result.shape)
    ((result * weights).sum() / result.numel() ** 0.5).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return result.detach(), gradients


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in sorted(ARCHITECTURES)]


@pytest.mark.parametrize("name", NAMES)
def test_architecture(name: str) -> None:
    model, inputs = build(name)
    exact_model, exact_inputs = in_double(model, inputs)
    fused = fusion.fuse(copy.deepcopy(model), options={"strict": True})
    result, gradients = training_step(model, inputs)
    exact, exact_gradients = training_step(exact_model, exact_inputs)
    got, got_gradients = training_step(fused, inputs)

    assert distance(got, exact) <= 2 * distance(result, exact) + TOLERANCE
    for key in (
        got_gradients.keys() - gradients.keys()
    ):  # of parameters without a path to the loss: zero instead of None
        assert not got_gradients[key].any(), key
    for key, gradient in gradients.items():
        allowed = 2 * distance(gradient, exact_gradients[key]) + GRADIENT_TOLERANCE.get(name, TOLERANCE)
        assert distance(got_gradients[key], exact_gradients[key]) <= allowed, key

    graphs = fusion.report(fused).graphs
    assert any(graph.kernels for graph in graphs) and not any(graph.failure for graph in graphs)
    for graph in graphs:
        strange = [e for e in graph.externs if not any(word in e.name for word in (*LIBRARY, *SCATTERS))]
        assert graph.operations >= 0.9 * (graph.operations + len(strange)), str(graph)
