"""Gradients of layers that read the same tensor are joined where that is faster, with unchanged results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fusion
from fusion.codegen.price import Rates
from fusion.joint.joined_gradients import join_gradients

aten = torch.ops.aten

RATES = Rates(launch_us=4.0, bandwidth=4e6, flops=1e7, matrix_flops=8e8, product_us=1.0)


def traced(function: Callable[..., object], *given: Tensor, symbolic: bool = False) -> GraphModule:
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*given)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def count(graph: GraphModule, target: object) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=target))


def assert_joined(
    function: Callable[..., Sequence[Tensor]], *given: Tensor, products: int, rates: Rates = RATES
) -> None:
    graph = traced(function, *given)
    join_gradients(graph, rates)
    assert count(graph, aten.mm.default) == products, graph.code
    for ours, theirs in zip(graph(*given), function(*given), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()


def assert_unchanged(
    function: Callable[..., object], *given: Tensor, rates: Rates = RATES, symbolic: bool = False
) -> None:
    graph = traced(function, *given, symbolic=symbolic)
    code = graph.code
    join_gradients(graph, rates)
    assert graph.code == code


def products_of(x: Tensor, *factors: Tensor) -> list[Tensor]:
    """Matrices of which each is a product: gradients that are not computed element by element."""
    return [x @ factor for factor in factors]


def weights_and_biases(x: Tensor, *factors: Tensor) -> list[Tensor]:
    found = products_of(x, *factors)
    return [part for g in found for part in (g.t() @ x, g.sum(0, keepdim=True), g.sum([0]))]


@pytest.mark.parametrize("widths", [(8, 8), (8, 4, 2), (3, 5, 7, 2)])
def test_products_of_weights_and_sums_of_biases_are_one_each(widths: tuple[int, ...]) -> None:
    assert_joined(weights_and_biases, numbers(6, 5), *(numbers(5, n) for n in widths), products=len(widths) + 1)


@pytest.mark.parametrize("terms_first", [False, True])
def test_the_gradient_of_the_tensor_is_one_product(terms_first: bool) -> None:
    def backward(x: Tensor, residual: Tensor, p: Tensor, q: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
        g, h = products_of(x, p, q)
        total = residual + (g @ v).view(2, 3, 5) if terms_first else (g @ v).view(2, 3, 5)
        total = total + (h @ w).view(2, 3, 5)
        if not terms_first:
            total = total + residual
        return [g.t() @ x, h.t() @ x, g.sum(0), h.sum(0), total * 2]

    given = numbers(6, 5), numbers(2, 3, 5), numbers(5, 4), numbers(5, 6), numbers(4, 5), numbers(6, 5)
    assert_joined(backward, *given, products=4)


def test_views_of_gradients_that_come_early_move_behind_the_joined_ones() -> None:
    def backward(x: Tensor, p: Tensor, q: Tensor) -> list[Tensor]:
        (g,) = products_of(x, p)
        first, bias = (g.t() @ x).t().t(), g.sum(0).view(-1, 1)
        (h,) = products_of(x, q)
        return [first, h.t() @ x, bias, h.sum(0)]

    assert_joined(backward, numbers(6, 5), numbers(5, 4), numbers(5, 6), products=4)
    graph = traced(backward, numbers(6, 5), numbers(5, 4), numbers(5, 6))
    graph.graph.lint()


def test_gradients_that_are_read_before_the_others_are_known_stay_apart() -> None:
    def backward(x: Tensor, p: Tensor, q: Tensor) -> list[Tensor]:
        (g,) = products_of(x, p)
        first = (g.t() @ x).sin()
        h = (x @ q) @ first
        return [first, h.t() @ x, g.sum(0), h.sum(0)]

    assert_unchanged(backward, numbers(6, 5), numbers(5, 4), numbers(5, 4))


def test_layers_with_another_product_between_them_stay_apart() -> None:
    def backward(x: Tensor, p: Tensor, q: Tensor, w: Tensor) -> list[Tensor]:
        (g,) = products_of(x, p)
        first, other = g.t() @ x, x @ w
        (h,) = products_of(other, q)
        return [first, g.sum(0), other, h.t() @ x, h.sum(0)]

    assert_unchanged(backward, numbers(6, 5), numbers(5, 4), numbers(5, 6), numbers(5, 5))


def test_gradients_with_other_readers_and_maps_stay_apart() -> None:
    def read(x: Tensor, p: Tensor, q: Tensor) -> list[Tensor]:
        g, h = products_of(x, p, q)
        return [g.t() @ x, h.t() @ x, g.sum(0), h.sum(0), g.sin(), h.sin()]

    def mapped(x: Tensor, p: Tensor, q: Tensor) -> list[Tensor]:
        g, h = (torch.sin(each) for each in products_of(x, p, q))
        return [g.t() @ x, h.t() @ x, g.sum(0), h.sum(0)]

    for backward in (read, mapped):
        assert_unchanged(backward, numbers(6, 5), numbers(5, 4), numbers(5, 6))


def test_a_copy_that_costs_more_than_it_saves_is_not_made() -> None:
    given = numbers(6, 5), numbers(5, 8), numbers(5, 8)
    assert_unchanged(weights_and_biases, *given, rates=replace(RATES, bandwidth=1.0))
    assert_joined(weights_and_biases, *given, products=3)


def test_sizes_that_are_not_known_stay_apart() -> None:
    assert_unchanged(weights_and_biases, numbers(6, 5), numbers(5, 8), numbers(5, 8), symbolic=True)


class Attention(nn.Module):
    """Attention over the results of three layers of one tensor."""

    def __init__(self, width: int, heads: int, *, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_attention_agree_with_eager(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it costs; parameters that are stepped in place must not disturb one another."""
    monkeypatch.setattr("fusion.joint.joined_gradients._gain", lambda layers, total, rates: 1.0 + (total is not None))
    module = Attention(32, 2, bias=bias).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True)
    fused = fusion.fuse(module, options={"strict": True, "graph_cache": False})
    ours = torch.autograd.grad(fused(x).square().sum(), [x, *module.parameters()])
    theirs = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact)
        assert mine.stride() == exact.stride()
    weights = [gradient for gradient in ours if gradient.shape == (32, 32)]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1, "they are rows of one product"
    before = [gradient.clone() for gradient in ours]
    ours[1].zero_()
    for mine, kept in zip(ours[2:], before[2:], strict=True):
        assert torch.equal(mine, kept)
