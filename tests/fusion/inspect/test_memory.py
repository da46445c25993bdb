"""Memory over time: what a graph holds while each of its steps runs, before and after fusion."""

from __future__ import annotations

import torch
from torch import nn

import fusion
from fusion.inspect.examples import lowered
from fusion.inspect.memory import held_by_nodes

FRESH = {"graph_cache": False}


def test_fusion_lowers_the_peak() -> None:
    explained = fusion.explain(lambda x: torch.softmax(torch.relu(x * 2) + 1, -1), options=FRESH)
    (graph,) = explained(torch.ones(64, 64)).graphs
    whole = 64 * 64 * 4
    assert graph.memory_after == (whole,)
    assert len(graph.memory_before) == len(graph.lowered) and max(graph.memory_before) >= 2 * whole


def test_results_stay_and_other_tensors_do_not() -> None:
    program = lowered(lambda x: ((x + 1).sum(0), x.sum(1)), torch.empty(8, 8))
    assert held_by_nodes(program, {}) == (256, 256 + 32, 32 + 32)


def test_views_and_inputs_hold_nothing() -> None:
    program = lowered(lambda x: (x + 1).t(), torch.empty(4, 8))
    assert set(held_by_nodes(program, {})) == {128}
    assert held_by_nodes(lowered(lambda x: x, torch.empty(4)), {}) == ()


def test_a_buffer_that_is_changed_in_place_holds_nothing() -> None:
    model = nn.BatchNorm1d(1000)
    graphs = fusion.explain(model, options=FRESH, backward=True)(torch.randn(4, 1000, requires_grad=True)).graphs
    assert [graph.label for graph in graphs] == ["forward", "backward"]
    forward = graphs[0]
    assert len(forward.memory_after) >= len(forward.kernels) and max(forward.memory_after) < 4 * 4 * 4 * 1000


def test_symbolic_sizes_count_as_traced() -> None:
    (graph,) = fusion.explain(lambda x: x * 2, dynamic=True, options=FRESH)(torch.ones(32, 3)).graphs
    assert graph.memory_after == (32 * 3 * 4,)
