"""The kernel that reads a product's epilogue computes it, where the library computes the product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch import Tensor

import fusion
import fusion.compilation.trials.measure
from fusion.codegen.triton.target import TritonTarget
from fusion.inspect.examples import lowered
from fusion.lowering.ir.program import Contract
from fusion.schedule.clusters.growth import grow
from fusion.schedule.library.readers import EpilogueReader, reader_of
from tests.golden import recording
from tests.golden.programs import Given, Program


def normed(x: Tensor, w: Tensor, r: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(F.linear(x, w) + r, g.shape, g, b)


def reader(function: Callable[..., object], *inputs: Tensor) -> EpilogueReader | None:
    """The reader of everything that shares a kernel with the product."""
    program, capabilities = lowered(function, *inputs), TritonTarget("sm_90").capabilities
    clustering = grow(program, capabilities)
    owners = {member: cluster for cluster in clustering.clusters for member in cluster.members}
    product = next(k for k, node in enumerate(program.nodes) if isinstance(node, Contract))
    return reader_of(clustering.prices, owners, [k for k in owners[product].members if k > product])


def test_a_norm_takes_the_sum_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = (4352, 4096), (1024, 4096), (4352, 1024), (1024,), (1024,)
    text = recording.decisions(Program(normed, tuple(map(Given, shapes))), "triton", monkeypatch)
    assert "call aten.mm.default" in text and text.count("  kernel ") == 1
    assert "kernel add_native_layer_norm: " in text


def test_the_epilogue_costs_less_than_a_kernel_of_its_own() -> None:
    x, w, r, g = torch.empty(4096, 512), torch.empty(1024, 512), torch.empty(4096, 1024), torch.empty(1024)
    found = reader(normed, x, w, r, g, g)
    assert found is not None
    assert found.alone < found.joined < 2 * found.alone


def test_what_an_operation_in_between_reads_stays_apart() -> None:
    """The softmax waits for the sort of the sum, which waits for the sum: one kernel cannot do both."""

    def f(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        total = x @ w + r
        return (total + total.sort(-1).values).softmax(-1)

    assert reader(f, torch.empty(512, 256), torch.empty(256, 512), torch.empty(512, 512)) is None


def test_a_product_is_no_reader() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w) @ w

    assert reader(f, torch.empty(512, 512), torch.empty(512, 512)) is None


@pytest.mark.parametrize("times", [[1.0, 2.0], [2.0, 1.0]], ids=["one kernel", "library"])
def test_trials_run_the_reader_too(times: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    shapes: list[list[torch.Size]] = []

    def medians(calls: Sequence[Callable[[], tuple[Tensor, ...]]], device: torch.device) -> list[float]:
        shapes.extend([tensor.shape for tensor in call()] for call in calls)
        return times

    monkeypatch.setattr(fusion.compilation.trials.measure, "medians", medians)
    inputs = [torch.randn(shape) for shape in ((7, 24), (20, 24), (7, 20), (20,), (20,))]
    options = {"target": "reference", "strict": True}
    explanation = fusion.explain(normed, mode="max-autotune", options=options)(*inputs)
    assert shapes == [[torch.Size([7, 20])]] * 2
    assert [kernel.name for kernel in explanation.kernels] == (
        ["matmul_add", "native_layer_norm"] if times[0] < times[1] else ["add_native_layer_norm"]
    )
    torch.testing.assert_close(fusion.fuse(normed, options=options)(*inputs), normed(*inputs))
