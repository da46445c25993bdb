"""Warm starts: compilations come from the cache, and return the same results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fusion.backend import Backend
from fusion.lowering.errors import IndexOutOfRange
from fusion.options import Options
from tests.fusion.graph_cache.starts import fresh, no_compilation, notes, started


def softmax_of_products(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1).cumsum(0)


def with_constants(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, -0.0, float("nan")]) + torch.tensor(3.0)


def in_place(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.sum(0)


def random_numbers(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5) + torch.rand_like(x)


def large_loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(x @ w, labels)


def loss_inputs() -> tuple[Tensor, ...]:
    x, w = torch.randn(280, 260), torch.randn(260, 1003)
    return x.requires_grad_(), w.requires_grad_(), torch.randint(1003, (280,))


PROGRAMS: list[tuple[Callable[..., Tensor], Callable[[], Sequence[Tensor]], dict[str, object]]] = [
    (softmax_of_products, lambda: (torch.randn(5, 7), torch.randn(7, 9).t().contiguous().t()), {}),
    (softmax_of_products, lambda: (torch.randn(5, 7).bfloat16(), torch.randn(7, 9).bfloat16()), {"numerics": "strict"}),
    (softmax_of_products, lambda: (torch.randn(5, 7), torch.randn(7, 9)), {"dynamic": True}),
    (with_constants, lambda: (torch.randn(4, 3),), {}),
    (in_place, lambda: (torch.randn(4, 3),), {}),
    (random_numbers, lambda: (torch.randn(40, 3),), {}),
    (large_loss, loss_inputs, {"workspace": 1 << 16}),
    (lambda x: torch.linalg.qr(x @ x)[0] + x.exp(), lambda: (torch.eye(3),), {}),
]


@pytest.mark.parametrize(("function", "make", "settings"), PROGRAMS)
def test_a_second_start_neither_lowers_nor_schedules_and_gives_the_same(function, make, settings, monkeypatch):
    given = make()
    first, cold = started(function, *map(fresh, given), **settings)
    assert notes(cold).count("from the cache") == 0
    no_compilation(monkeypatch)
    second, result = started(function, *map(fresh, given), **settings)
    assert torch.equal(torch.nan_to_num(first, 17.0), torch.nan_to_num(second, 17.0))
    assert first.stride() == second.stride()
    assert [graph.notes[-1] for graph in result.graphs] == ["from the cache"] * len(cold.graphs)
    same = [replace(graph, notes=graph.notes[:-1]) for graph in result.graphs]
    assert same == list(cold.graphs)


def test_chunks_are_cached():
    report = started(large_loss, *loss_inputs(), workspace=1 << 16)[1]
    assert any("in chunks" in note for note in notes(report))


def test_gradients_of_a_second_start_equal_the_first_ones(monkeypatch):
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.GELU())
    x = torch.randn(3, 6)
    gradients: list[list[Tensor]] = []
    for attempt in range(2):
        model.zero_grad()
        _, report = started(lambda x: model(x), x)
        assert [graph.label for graph in report.graphs] == ["forward", "backward"]
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        if attempt == 0:
            no_compilation(monkeypatch)
    assert notes(report) == ["from the cache"] * 2
    assert len(gradients[0]) == 4
    assert all(map(torch.equal, *gradients))


def test_gradients_that_are_computed_ahead_have_the_same_names_at_each_start():
    """Nodes from a set would be in the order of their addresses, and backward would be scheduled anew."""
    given = [torch.randn(64, 16), torch.randn(96, 16), torch.randint(96, (64,))]

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(hidden @ weight.t(), target)

    for start in range(6):
        inputs = [given[0].clone().requires_grad_(), given[1].clone().requires_grad_(), given[2]]
        _, explained = started(loss, *inputs, workspace=1 << 10)
        assert [("from the cache" in part.notes) for part in explained.graphs] == [start > 0] * 2


def test_a_failed_check_names_the_line_of_the_user_at_a_second_start_too():
    table, positions = torch.randn(4, 3), torch.tensor([0, 9])
    reported = []
    for _ in range(2):
        with pytest.raises(IndexOutOfRange) as failure:
            started(lambda table, positions: table[positions] * 2, table, positions)
        reported.append(str(failure.value))
    assert reported[0] == reported[1]
    assert "test_starts.py" in reported[0]


def test_sizes_that_were_not_there_run_as_kept(monkeypatch):
    small, large = (torch.randn(5, 7), torch.randn(7, 9)), (torch.randn(6, 11), torch.randn(11, 4))
    started(softmax_of_products, *small, dynamic=True)
    no_compilation(monkeypatch)
    torch._dynamo.reset()
    fused = torch.compile(softmax_of_products, backend=Backend(Options.read(None, {"strict": True})), dynamic=True)
    for inputs in (small, large):
        torch.testing.assert_close(fused(*inputs), softmax_of_products(*inputs))


@pytest.mark.parametrize(
    "options",
    [
        {"graph_cache": False},
        {"dump": "dumped"},
        {"override": "edited"},
        {"numerics": "strict"},
        {"workspace": 1 << 20},
    ],
)
def test_other_options_compile_anew(options, tmp_path):
    if "dump" in options:
        options = {"dump": tmp_path / "dumped"}
    if "override" in options:
        options = {"override": tmp_path}
    x = torch.randn(4, 3)
    started(torch.sigmoid, x)
    assert notes(started(torch.sigmoid, x, **options)[1]) == []
    assert notes(started(torch.sigmoid, x)[1]) == ["from the cache"]


def test_nothing_is_kept_where_that_is_not_wished(cache, monkeypatch):
    monkeypatch.setenv("FUSION_GRAPH_CACHE", "0")
    started(torch.sigmoid, torch.randn(4, 3))
    assert not cache.exists()
