"""Rows of a large product without readers are not computed, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by

from fusion.backend import Backend
from fusion.inspect.report import Report
from fusion.options import Options

Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BATCH, LENGTH, WIDTH, WORDS = 3, 20, 24, 50


def last(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(F.linear(x, w)[:, -1].float(), -1)


def last_kept(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w).float()[..., -1:, :] * 2


def capped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp((torch.tanh((x @ w.t()) / 30) * 30).to(torch.float32)[1:, 2:-1:3], -1)


def of_a_matrix(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x[0], w.t())[4].exp()


def biased(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, w[:, 0])[:2, ..., :].relu()


def columns(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)[..., :7].relu()


def read_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, w)
    return logits[:, -1].relu() + logits.amax(1)


def returned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)[:, -1]


def written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, w)
    part = logits[:, 1:]
    part.mul_(2)
    return part + logits[:, :-1]


def added_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (F.linear(x, w) + w[:LENGTH, :1])[:, :-1].relu()


READ = {last: BATCH, last_kept: BATCH, capped: 12, of_a_matrix: 1, biased: 2 * LENGTH}
"""Program → the number of rows that are still computed."""


def fused(program: Program) -> tuple[Program, list[Report], list[torch.fx.GraphModule]]:
    torch._dynamo.reset()
    backend = Backend(Options(strict=True, workspace=1 << 10))
    graphs: list[torch.fx.GraphModule] = []

    def listening(graph: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        compiled = backend(graph, inputs)
        graphs.append(graph)
        return compiled

    return torch.compile(program, backend=listening), backend.reports, graphs


def rows_computed(graph: torch.fx.GraphModule) -> int:
    """Return the number of rows of the first product."""
    names = {torch._C._nn.linear, torch.matmul, torch.ops.aten.linear.default}
    product = next(n for n in graph.graph.nodes if n.target in names or getattr(n.target, "__name__", "") == "matmul")
    val = product.meta["example_value"]
    return int(val.numel() // val.shape[-1])


def outcome(program: Program, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((BATCH, LENGTH, WIDTH), (WORDS, WIDTH))
    x, w = (torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    result = program(x, w)
    return [result.detach(), *torch.autograd.grad(result.sum(), (x, w))]


def check(program: Program, ours: Program) -> None:
    result = zip(*(outcome(f, d) for f, d in ((ours, torch.float32), (program, torch.float32))), strict=True)
    for (got, eager), exact in zip(result, outcome(program, torch.float64), strict=True):
        assert (got.shape, got.stride(), got.dtype) == (eager.shape, eager.stride(), eager.dtype)
        assert (got - exact).norm() <= 2 * (eager - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("program", READ, ids=lambda program: program.__name__)
def test_only_the_rows_that_are_read_are_computed(program: Program) -> None:
    ours, _, graphs = fused(program)
    check(program, ours)
    assert [rows_computed(graph) for graph in graphs] == [READ[program]]


@pytest.mark.parametrize("program", [columns, read_twice, returned, written, added_rows], ids=lambda f: f.__name__)
def test_products_with_other_readers_are_computed_whole(program: Program) -> None:
    ours, _, graphs = fused(program)
    check(program, ours)
    assert [rows_computed(graph) for graph in graphs] == [BATCH * LENGTH]
