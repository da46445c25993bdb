"""Random loops over tiles: sums and products of scores, read at many indices, and their consumers.

Every kernel is written for a GPU.  The scheduler detects tiles that are no matrices in their loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.codegen.triton import TritonTarget
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.interpret import run_program
from fusion.schedule import chained as streams
from fusion.schedule.chained import candidates as tiles

BATCH, SIDE, WIDTH = 2, 4, 3
POINTS = SIDE * SIDE
GPU = TritonTarget("sm_90")
Operands = Sequence[torch.Tensor]


def scores(q: torch.Tensor, k: torch.Tensor, _: Operands) -> torch.Tensor:
    return q @ k.mT


def flipped(q: torch.Tensor, k: torch.Tensor, _: Operands) -> torch.Tensor:
    return (q @ k.mT).flip(-1)


def mirrored(q: torch.Tensor, k: torch.Tensor, _: Operands) -> torch.Tensor:
    return q @ k.mT + (q @ k.mT).mT


def of_all(q: torch.Tensor, k: torch.Tensor, of: Operands) -> torch.Tensor:
    return of[0] @ of[0].mT


def of_keys(q: torch.Tensor, k: torch.Tensor, of: Operands) -> torch.Tensor:
    return (of[1] @ of[0].mT)[:, None]


def of_distances(q: torch.Tensor, k: torch.Tensor, of: Operands) -> torch.Tensor:
    result = F.pad(q @ of[2].mT, (0, 1)).flatten(1)
    return F.pad(result, (0, POINTS - 1)).view(BATCH, POINTS + 1, 2 * POINTS - 1)[:, :POINTS, POINTS - 1 :]


def of_rows(q: torch.Tensor, k: torch.Tensor, of: Operands) -> torch.Tensor:
    added = torch.einsum("brcd,rkd->brck", q.view(BATCH, SIDE, SIDE, WIDTH), of[0].view(SIDE, SIDE, WIDTH))
    return added.reshape(BATCH, POINTS, SIDE).repeat_interleave(SIDE, -1)


def of_both_sides(q: torch.Tensor, k: torch.Tensor, of: Operands) -> torch.Tensor:
    return (q[:, :SIDE] @ k[:, :SIDE].mT).reshape(BATCH, 1, POINTS)


TILES = (scores, flipped, mirrored, of_all, of_keys, of_distances, of_rows, of_both_sides)

SINKS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "attention": lambda x, v: x.softmax(-1) @ v,
    "attention to rows": lambda x, v: x.softmax(-2).mT @ v,
    "both": lambda x, v: x.softmax(-1) @ v + x.relu().mT @ v,
    "logarithms": lambda x, v: x.logsumexp(-1),
    "sums": lambda x, v: x.relu().sum(-1),
    "running sums": lambda x, v: x.tanh().cumsum(-1) @ v,
}


@pytest.fixture(scope="module", autouse=True)
def everything_is_chained() -> object:
    """Chain every product, of any size and price."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "LEAST_TILE", 1)
        patch.setattr(streams._Finder, "_is_worthwhile", lambda finder, result: True)
        yield


@settings(max_examples=48, deadline=None, derandomize=True, database=None, suppress_health_check=tuple(HealthCheck))
@given(st.lists(st.sampled_from(TILES), min_size=1, max_size=3), st.sampled_from(sorted(SINKS)), st.booleans())
def test_every_kernel_of_chained_products_is_generated(
    parts: list[Callable[..., torch.Tensor]], sink: str, scaled: bool
) -> None:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *of: torch.Tensor) -> torch.Tensor:
        first, *others = (part(q, k, of) for part in parts)
        for other in others:
            first = first * other.sigmoid() if scaled else first + other
        return SINKS[sink](first.expand(BATCH, POINTS, POINTS), v)

    shapes = [(BATCH, POINTS, WIDTH)] * 3 + [(POINTS, WIDTH), (BATCH, WIDTH), (2 * POINTS - 1, WIDTH)]
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k, shape in enumerate(shapes)]
    graph = make_fx(program, tracing_mode="fake", decomposition_table=decompositions())(*inputs)
    schedule = schedule_graph(graph, GPU, Trace(None, "graph"))[1]
    assert all(GPU.emit(call.kernel) for call in schedule.launches())
    reported = {refusal.reason for refusal in schedule.refusals}
    assert not {reason for reason in reported if "more than a matrix" in reason or "spread other axes" in reason}
    (got,) = run_program(schedule.program, inputs)
    torch.testing.assert_close(got, program(*inputs), rtol=1e-4, atol=1e-4)
