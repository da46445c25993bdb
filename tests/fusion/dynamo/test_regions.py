"""Regions marked with `nested_compile_region` are fused with their neighbours, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx
from torch.compiler import nested_compile_region
from torch.utils.checkpoint import checkpoint

import fusion
from fusion.dynamo.nested_regions import INVOKE, inline_regions
from tests.fusion.agreement import STRICT


@nested_compile_region
def scaled(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w) * 2


@nested_compile_region
def several(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tanh(x * w[0]), x + w[1], x.mean()


@nested_compile_region
def doubled(x: Tensor, w: Tensor) -> Tensor:
    return scaled(scaled(x, w), w).sin()


@nested_compile_region
def checkpointed_region(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(lambda t: torch.tanh(t @ w).sin(), x, use_reentrant=False) * 2


@nested_compile_region
def branching(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t: t.sin() * 2, lambda t: t.cos() + 1, (x,))


@nested_compile_region
def written(x: Tensor) -> Tensor:
    return x.add_(1).sin()


@nested_compile_region
def positive(x: Tensor) -> Tensor:
    return x[x > 0].exp()


def of_several_results(x: Tensor, w: Tensor) -> Tensor:
    a, b, _ = several(x, w)
    c, d, e = several(a * b, w)
    return c * d + e


def of_rows_and_without_gradient(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        a = scaled(x, w)
    return scaled(a * x, w) + scaled(x[:2], w).sum()


def in_a_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(lambda t: scaled(scaled(t, w), w).exp(), x.sin(), use_reentrant=False) * 2


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "called twice": lambda x, w: scaled(scaled(x.sin(), w), w) + 1,
    "several results": of_several_results,
    "in one another": lambda x, w: doubled(doubled(x, w) * 2, w),
    "in a checkpoint": in_a_checkpoint,
    "around a checkpoint": lambda x, w: checkpointed_region(checkpointed_region(x, w).cos(), w) + 1,
    "other rows, no gradient": of_rows_and_without_gradient,
    "around a branch": lambda x, w: branching(branching(x @ w).exp()) + 1,
    "written in place": lambda x, w: written(written(x @ w)) * 2,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_regions_are_part_of_the_graph(name: str, dynamic: bool) -> None:
    x, w = (torch.randn(rows, 5, dtype=torch.float64, requires_grad=True) for rows in (3, 5))
    fused = fusion.fuse(PROGRAMS[name], dynamic=dynamic, options=STRICT)
    result, expected = fused(x, w), PROGRAMS[name](x, w)
    torch.testing.assert_close(result, expected)
    gradients = torch.autograd.grad(result.square().sum(), (x, w))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), (x, w)))
    assert all("invoke_subgraph" not in extern.name for extern in fusion.report(fused).externs)


def captured(function: Callable[..., object], x: Tensor) -> fx.GraphModule:
    """Dynamo's graph of a call."""
    results: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: object) -> fx.GraphModule:
        results.append(graph)
        return graph

    with patch.object(torch._dynamo.config, "capture_dynamic_output_shape_ops", True):
        torch.compile(function, backend=keep)(x)
    (graph,) = results
    return graph


def calls(graph: fx.GraphModule) -> int:
    parts = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
    return sum(len(part.graph.find_nodes(op="call_function", target=INVOKE)) for part in parts)


def test_nothing_is_left_of_a_region_but_its_operations() -> None:
    w = torch.randn(5, 5)
    graph = captured(lambda x: doubled(doubled(x, w), w), torch.randn(3, 5))
    inline_regions(graph)
    assert calls(graph) == 0 and not list(graph.children())
    assert len(graph.graph.find_nodes(op="call_function", target=torch.tanh)) == 4


def test_data_dependent_sizes_change_with_each_call() -> None:
    x = torch.randn(7)
    graph = captured(lambda x: positive(x).sum() + positive(x.sin()).sum(), x)
    inline_regions(graph)
    assert calls(graph) == 2
    torch.testing.assert_close(graph(x), (x[x > 0].exp().sum() + x.sin()[x > 0].exp().sum(),))


def test_regions_with_options_of_their_own_stay() -> None:
    x, w = torch.randn(3, 5), torch.randn(5, 5)
    graph = captured(lambda x: scaled(scaled(x, w), w), x)
    (body,) = graph.children()
    body.meta["nested_region_config"] = object()
    inline_regions(graph)
    assert calls(graph) == 2
