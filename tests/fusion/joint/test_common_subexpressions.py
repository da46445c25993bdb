"""Common subexpressions of a joint graph are computed once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.joint.common_subexpressions import eliminate_common_subexpressions


def merged(program: Callable[[Tensor], object]) -> list[str]:
    """Return the names of a program's calls after repeated ones are merged, and check its results."""
    x = torch.linspace(-2, 2, 8)
    graph: fx.GraphModule = make_fx(program, tracing_mode="fake")(x)
    before = fx.GraphModule(graph, graph.graph.__class__())
    before.graph.output(before.graph.graph_copy(graph.graph, {}))
    before.recompile()
    eliminate_common_subexpressions(graph)
    graph.graph.lint()
    torch.manual_seed(0)
    expected = before(x.clone())
    torch.manual_seed(0)
    torch.testing.assert_close(graph(x.clone()), expected, rtol=0, atol=0, equal_nan=True)
    return [node.target._schema.name[6:] for node in graph.graph.nodes if node.op == "call_function"]


def test_a_repeated_computation_is_merged() -> None:
    assert merged(lambda x: (x.exp() + 1) * (x.exp() + 1)) == ["exp", "add", "mul"]
    assert merged(lambda x: x.reshape([2, 4]).sum(0) + x.reshape([2, 4]).sum(0)) == ["view", "sum", "add"]


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.copysign(x, 0.0) + torch.copysign(x, -0.0),
        lambda x: x.new_full([], 1) / x.new_full([], True),
        lambda x: torch.rand_like(x) - torch.rand_like(x),
    ],
)
def test_calls_that_only_look_alike_stay(program: Callable[[Tensor], object]) -> None:
    called = merged(program)
    assert called[0] == called[1]


def test_results_have_memory_of_their_own() -> None:
    assert merged(lambda x: (x.exp(), x.exp())) == ["exp", "exp"]


def test_calls_before_and_after_a_change_are_not_merged() -> None:
    def program(x: Tensor) -> Tensor:
        y = x + 1
        before = y.exp()
        y.mul_(2)
        return before - y.exp()

    assert merged(program) == ["add", "exp", "mul_", "exp", "sub"]
