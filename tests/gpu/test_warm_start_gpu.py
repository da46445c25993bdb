"""Warm starts on a device: a second start has the kernels of the first, which accept other tensors equally."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fusion.compilation.compile
from fusion.backend import Backend
from fusion.inspect.report import Report
from fusion.options import Options

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of this test alone, in use."""
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FUSION_GRAPH_CACHE", "1")


def started(
    function: Callable[..., Tensor], dynamic: bool | None = None, **options: object
) -> tuple[Callable[..., Tensor], list[Report]]:
    """A compilation of which nothing remains in this process, and the path of its reports."""
    torch._dynamo.reset()
    backend = Backend(Options.read(None, {"strict": True, **options}))
    return torch.compile(function, backend=backend, dynamic=dynamic), backend.reports


def mean_of_rows(x: Tensor) -> Tensor:
    return torch.softmax(x * 3, -1).square().mean()


def norm_and_product(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.gelu(nn.functional.layer_norm(x, x.shape[-1:]) @ w)


def tables(x: Tensor, w: Tensor) -> Tensor:
    return w[(x[:, 0].abs() * 10).long() % len(w)].cumsum(0)


PROGRAMS = [
    (mean_of_rows, ((33, 1000),)),
    (norm_and_product, ((64, 128), (128, 96))),
    (tables, ((40, 3), (9, 65))),
]


@pytest.mark.parametrize("cudagraphs", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("function", "shapes"), PROGRAMS)
def test_a_second_start_runs_the_kernels_of_the_first(function, shapes, dynamic, cudagraphs, monkeypatch):
    given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    unaligned = [torch.randn(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape) for x in given]
    options = {"cudagraphs": cudagraphs}
    fused, reports = started(function, dynamic, **options)
    first = [fused(*inputs).clone() for inputs in (given, given, unaligned)]
    assert all("from the cache" not in report.notes for report in reports)
    monkeypatch.setattr(fusion.compilation.compile, "schedule_graph", None)
    fused, reports = started(function, dynamic, **options)
    second = [fused(*inputs).clone() for inputs in (given, given, unaligned)]
    assert reports
    assert all("from the cache" in report.notes for report in reports)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_gradients_of_a_second_start_equal_the_first_ones(monkeypatch):
    model = nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 7)).cuda()
    x = torch.randn(50, 96, device="cuda")
    gradients: list[list[Tensor]] = []
    for _ in range(2):
        model.zero_grad()
        fused, reports = started(lambda x: model(x))
        fused(x).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        monkeypatch.setattr(fusion.compilation.compile, "schedule_graph", None)
    assert [report.notes[-1] for report in reports] == ["from the cache"] * 2
    assert len(gradients[0]) == 6
    torch.testing.assert_close(gradients[1], gradients[0])
