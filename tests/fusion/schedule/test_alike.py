"""Clusters that are alike share prices and kernels; clusters that differ in anything but names do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusion.codegen.target import Capabilities
from fusion.inspect.examples import TARGET, lowered
from fusion.lowering.ir.program import Program
from fusion.schedule.chained import chain_products
from fusion.schedule.clusters.alike import Alike
from fusion.schedule.clusters.growth import Clustering, grow
from fusion.schedule.clusters.legality import Cluster, single
from fusion.schedule.clusters.profit import Prices
from fusion.schedule.iteration.dependences import Dependences
from fusion.schedule.kernels import kernel_of
from tests.fusion.schedule.test_schedule import GPU


def layers(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    for weight in (a, b, c, d):
        x = x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ weight)
    return x


def attentions(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    for weight in (a, b, c, d):
        scores = torch.softmax((x @ weight) @ x.transpose(-1, -2), -1)
        x = x + scores @ x
    return x


def of_two_dtypes(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Equal operations whose rounding differs."""
    for number, weight in enumerate((a, b, c, d)):
        x = (x @ weight).relu().to(torch.bfloat16 if number % 2 else torch.float32).float().sin()
    return x


PROGRAMS = [layers, attentions, of_two_dtypes]


def clustered(function: Callable[..., Tensor], capabilities: Capabilities) -> tuple[Program, Clustering]:
    inputs = torch.empty(4, 64, 128), *(torch.empty(128, 128) for _ in range(4))
    program, chains = chain_products(lowered(function, *inputs), capabilities)
    return program, grow(program, capabilities, given=chains)


@pytest.mark.parametrize("capabilities", [GPU, TARGET.capabilities], ids=["gpu", "reference"])
@pytest.mark.parametrize("function", PROGRAMS)
def test_a_cluster_has_the_price_and_the_kernel_that_it_has_alone(
    function: Callable[..., Tensor], capabilities: Capabilities
) -> None:
    program, clustering = clustered(function, capabilities)
    assert len(clustering.clusters) > 3
    for cluster in clustering.clusters:
        alone = Prices(Dependences(program), capabilities)
        assert clustering.prices.price(cluster) == alone.price(cluster)
        shared, own = kernel_of(clustering.prices, cluster), kernel_of(alone, cluster)
        assert shared == own
        assert shared.kernel.origins == own.kernel.origins


@pytest.mark.parametrize("use", ["price", "kernel"])
def test_equal_layers_are_computed_once(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last layer differ: they read the input, and write the result."""
    computed: list[Cluster] = []
    of_first = Alike.of_first

    def counting(self: Alike, name: str, cluster: Cluster, compute: Callable[[], object]) -> object:
        def counted() -> object:
            computed.append(cluster)
            return compute()

        return of_first(self, name, cluster, counted if name == use else compute)

    monkeypatch.setattr(Alike, "of_first", counting)
    _, clustering = clustered(layers, GPU)
    for cluster in clustering.clusters:
        clustering.prices.price(cluster)
        kernel_of(clustering.prices, cluster)
    kinds = [cluster.members for cluster in clustering.clusters]
    built = [cluster.members for cluster in computed if cluster.members in kinds]
    assert len(built) < len(kinds)
    assert len(computed) == len({cluster.members for cluster in computed})


def sine(x: Tensor) -> Tensor:
    return x.sin()


PLAIN = torch.empty(8, 8)


@pytest.mark.parametrize(
    ("function", "x", "is_alike"),
    [
        (lambda renamed: renamed.sin(), PLAIN, True),
        (sine, torch.empty(8, 8, dtype=torch.float64), False),
        (sine, torch.empty(8, 4), False),
        (sine, PLAIN.t(), False),
        (torch.cos, PLAIN, False),
    ],
    ids=["name", "dtype", "size", "strides", "operation"],
)
def test_nodes_differ_in_any_fact_but_their_names(function: Callable[..., Tensor], x: Tensor, is_alike: bool) -> None:
    first = Alike(Dependences(lowered(sine, PLAIN)))
    other = Alike(Dependences(lowered(lambda renamed: function(renamed), x)), first)
    assert (other.node(0).form == first.node(0).form) == is_alike


def test_a_result_that_is_needed_outside_makes_a_difference() -> None:
    """Both are a product and a sine; of the second program, the product is a result as well."""

    def inside(x: Tensor) -> Tensor:
        return (x * 2).sin()

    def outside(x: Tensor) -> tuple[Tensor, Tensor]:
        doubled = x * 2
        return doubled, doubled.sin()

    first = Dependences(lowered(inside, PLAIN))
    second = Dependences(lowered(outside, PLAIN))
    alike = Alike(first)
    again = Alike(second, alike)
    pair = Cluster.of(single(first, GPU, 0).space, {0: {}, 1: {}})
    numbers = iter(range(2))
    assert alike.of_first("number", pair, lambda: next(numbers))[0] == 0
    assert again.of_first("number", pair, lambda: next(numbers))[0] == 1
    assert again.node(1).form == alike.node(1).form
