"""DDP, FSDP2 and tensor parallel in two processes: kernels are generated, and training agrees with eager."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fusion
from fusion.backend import Backend, backend_of
from fusion.inspect.report import Report
from fusion.options import Options
from tests.frameworks.pair import Pair, started
from tests.frameworks.training import Model, Training, assert_trained_alike, model

pytestmark = pytest.mark.slow  # processes that outlive a test are not in its CPU time

STRICT: dict[str, object] = {"strict": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with started(tmp_path_factory.mktemp("pair")) as processes:
        yield processes


def compiled(program: Callable[..., Any], **settings: Any) -> tuple[Any, Backend]:
    """A program under `torch.compile`, and its backend, which has the reports."""
    backend = Backend(Options.read(None, STRICT))
    return torch.compile(program, backend=backend, **settings), backend


def shapes(reports: list[Report]) -> list[tuple[str, int, int]]:
    """The label of each graph, and how many kernels and library calls it has."""
    return [(report.label, len(report.kernels), len(report.externs)) for report in reports]


# DDP ----------------------------------------------------------------------------------------------------------------


def ddp_around(how: Training, checkpointed: bool) -> list[tuple[str, int, int]]:
    how = Training(**{**vars(how), "seed": 1 + dist.get_rank()})
    fused = fusion.fuse(model(checkpointed=checkpointed), options=STRICT)
    eager = DistributedDataParallel(model(checkpointed=checkpointed))
    assert_trained_alike(DistributedDataParallel(fused), eager, how)
    return shapes(list(fusion.report(fused).graphs))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("how", [Training(), Training(accumulated=3), Training(autocast=True)], ids=repr)
def test_ddp_around_a_fused_module(how: Training, checkpointed: bool, pair: Pair) -> None:
    for graphs in pair.run(ddp_around, how, checkpointed):
        assert {label for label, *_ in graphs} == {"forward", "backward"}
        assert all(kernels and not externs for _, kernels, externs in graphs)


def ddp_in_buckets(how: Training, checkpointed: bool, dynamic: bool | None, cached: bool) -> list[list[Any]]:
    """A model of several buckets, compiled with DDP around it: PyTorch splits it by the buckets."""
    how = Training(**{**vars(how), "seed": 1 + dist.get_rank()})
    settings = {"blocks": 3, "width": 224, "checkpointed": checkpointed}
    found = []
    os.environ["FUSION_GRAPH_CACHE"] = str(int(cached))
    for _ in range(1 + cached):
        torch._dynamo.reset()
        ours, backend = compiled(DistributedDataParallel(model(**settings), bucket_cap_mb=1.2), dynamic=dynamic)
        eager = DistributedDataParallel(model(**settings), bucket_cap_mb=1.2)
        assert_trained_alike(ours, eager, how, width=224)
        found.append([shapes(backend.reports), [note for report in backend.reports for note in report.notes]])
    os.environ["FUSION_GRAPH_CACHE"] = "0"
    return found


@pytest.mark.parametrize(
    ("how", "checkpointed", "dynamic"),
    [
        (Training(), False, None),
        (Training(), False, True),
        (Training(), True, None),
        (Training(accumulated=2), False, None),
        (Training(autocast=True), False, None),
    ],
)
def test_a_model_that_is_split_by_the_buckets_of_ddp(how, checkpointed, dynamic, pair: Pair) -> None:
    for ((graphs, _),) in pair.run(ddp_in_buckets, how, checkpointed, dynamic, False):
        labels = [label for label, *_ in graphs]
        assert labels.count("forward") >= 3, "PyTorch has split the model"
        assert labels.count("backward") == labels.count("forward")
        assert sum(kernels for _, kernels, _ in graphs) >= len(graphs)


def test_the_parts_of_a_model_that_ddp_splits_are_graphs_of_the_cache(pair: Pair) -> None:
    """AOTAutograd answers one call of each part with fake tensors while it traces it, so regions are traced again."""
    for (_, first), (_, second) in pair.run(ddp_in_buckets, Training(), False, None, True):
        assert "not kept in the cache: a part of a model that PyTorch splits by DDP's buckets" in first
        assert second.count("from the cache") >= 6


def ddp_compiled_by_name() -> list[tuple[str, int, int]]:
    how = Training(seed=1 + dist.get_rank())
    ours = torch.compile(DistributedDataParallel(model()), backend=fusion.fusion_backend, options=STRICT)
    assert_trained_alike(ours, DistributedDataParallel(model()), how)
    return shapes(list(fusion.report(ours).graphs))


def test_ddp_compiled_as_a_whole(pair: Pair) -> None:
    for graphs in pair.run(ddp_compiled_by_name):
        assert [label for label, *_ in graphs] == ["forward", "backward"]
        assert all(kernels and not externs for _, kernels, externs in graphs)


# FSDP2 --------------------------------------------------------------------------------------------------------------


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(whole: Model, **settings: Any) -> Model:
    for block in whole.blocks:
        fully_shard(block, mesh=mesh(), **settings)
    return fully_shard(whole, mesh=mesh(), **settings)


def compile_blocks(whole: Model) -> Model:
    for block in whole.blocks:
        block.compile(backend=fusion.fusion_backend, options=STRICT)
    return whole


def fuse_blocks(whole: Model) -> Model:
    for number, block in enumerate(whole.blocks):
        whole.blocks[number] = fusion.fuse(block, options=STRICT)
    return whole


def wrap_blocks(whole: Model) -> Model:
    for number, block in enumerate(whole.blocks):
        wrapped: Any = torch.compile(block, backend=fusion.fusion_backend, options=STRICT)
        whole.blocks[number] = wrapped
    return whole


WAYS: dict[str, Callable[[Model], Any]] = {
    "compile blocks, shard": lambda whole: sharded(compile_blocks(whole)),
    "shard, compile blocks": lambda whole: compile_blocks(sharded(whole)),
    "fuse blocks, shard": lambda whole: sharded(fuse_blocks(whole)),
    "shard, fuse blocks": lambda whole: fuse_blocks(sharded(whole)),
    "wrap blocks, shard": lambda whole: sharded(wrap_blocks(whole)),
    "shard, fuse": lambda whole: fusion.fuse(sharded(whole), options=STRICT),
    "shard, compile": lambda whole: torch.compile(sharded(whole), backend=fusion.fusion_backend, options=STRICT),
}


def fsdp(way: str, how: Training, checkpointed: bool) -> tuple[list[tuple[str, int, int]], int]:
    how = Training(**{**vars(how), "seed": 1 + dist.get_rank()})
    counters.clear()
    ours = WAYS[way](model(checkpointed=checkpointed))
    assert_trained_alike(ours, sharded(model(checkpointed=checkpointed)), how)
    backends = {id(backend): backend for part in ours.modules() if (backend := backend_of(part)) is not None}
    return [one for backend in backends.values() for one in shapes(backend.reports)], counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("way", WAYS)
def test_fsdp_around_compiled_blocks(way: str, pair: Pair) -> None:
    """Equal blocks are compiled once for an input without gradients, and once for one with."""
    for graphs, captured in pair.run(fsdp, way, Training(), False):
        assert {label for label, *_ in graphs} == {"forward", "backward"}
        assert all(kernels and not externs for _, kernels, externs in graphs)
        assert captured <= 3


@pytest.mark.parametrize(("how", "checkpointed"), [(Training(), True), (Training(accumulated=2), False)])
def test_fsdp_with_checkpoints_and_accumulation(how: Training, checkpointed: bool, pair: Pair) -> None:
    for graphs, _ in pair.run(fsdp, "shard, compile blocks", how, checkpointed):
        assert {label for label, *_ in graphs} == {"forward", "backward"}
        assert all(kernels and not externs for _, kernels, externs in graphs)


def fsdp_in_bfloat16() -> list[tuple[str, int, int]]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours = sharded(compile_blocks(model().float()), mp_policy=policy)
    eager = sharded(model().float(), mp_policy=policy)
    assert_trained_alike(ours, eager, Training(seed=1 + dist.get_rank(), autocast=True))
    backend = backend_of(ours.blocks[0])
    assert backend is not None
    return shapes(backend.reports)


def test_fsdp_in_mixed_precision(pair: Pair) -> None:
    for graphs in pair.run(fsdp_in_bfloat16):
        assert {label for label, *_ in graphs} == {"forward", "backward"}
        assert all(kernels for _, kernels, _ in graphs)


# Tensor parallel ----------------------------------------------------------------------------------------------------


def split(whole: Model, sequence: bool) -> Model:
    """Divide each block by its inner features; `sequence` also divides its rows, outside of the products."""
    rows, all_rows = Shard(0), Replicate()
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        norm = SequenceParallel(sequence_dim=0, use_local_output=True)
        up, down = ColwiseParallel(input_layouts=rows), RowwiseParallel(output_layouts=rows)
        plan = {"norm": norm, "up": up, "down": down}
    for block in whole.blocks:
        parallelize_module(block, mesh(), plan)
        if sequence:
            given = PrepareModuleInput(input_layouts=all_rows, desired_input_layouts=rows, use_local_output=True)
            parallelize_module(block, mesh(), given)
            parallelize_module(block, mesh(), PrepareModuleOutput(output_layouts=rows, desired_output_layouts=all_rows))
    return whole


def tensor_parallel(way: str, sequence: bool) -> tuple[list[tuple[str, int, int]], list[str]]:
    parts = split(model(), sequence)
    whole = way == "whole"
    ours = fusion.fuse(parts, options=STRICT) if whole else compile_blocks(parts)
    assert_trained_alike(ours, model(), Training())  # all processes have the same rows
    backends = [backend_of(part) for part in ([ours] if whole else [*parts.blocks])]
    reports = list({id(report): report for backend in backends if backend for report in backend.reports}.values())
    return shapes(reports), sorted({str(call.name) for report in reports for call in report.externs})


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("way", ["whole", "blocks"])
def test_tensor_parallel(way: str, sequence: bool, pair: Pair) -> None:
    """Communication is a call in the graph, between kernels; nothing else is a library's."""
    for graphs, calls in pair.run(tensor_parallel, way, sequence):
        assert {label for label, *_ in graphs} >= {"forward", "backward"}
        assert sum(kernels for _, kernels, _ in graphs) >= 6  # a graph that only deals out rows has none
        assert calls and all(call.startswith("_c10d_functional.") for call in calls), calls
        assert any("reduce_scatter" in call for call in calls) == sequence


def of_dtensors(x: Tensor, w: Tensor) -> Tensor:
    return (nn.functional.gelu(x @ w) + 1).softmax(-1)


def with_dtensors() -> list[tuple[str, int, int]]:
    """Inputs, results and gradients that are distributed tensors."""
    x, w = torch.randn(6, 16, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64)
    given = distribute_tensor(x, mesh(), [Shard(0)]), distribute_tensor(w, mesh(), [Replicate()]).requires_grad_()
    function, backend = compiled(of_dtensors)
    w.requires_grad_()
    result, expected = function(*given), of_dtensors(x, w)
    torch.testing.assert_close(result.full_tensor(), expected)
    assert result.placements == (Shard(0),)
    result.full_tensor().square().sum().backward()
    expected.square().sum().backward()
    gradient = given[1].grad
    assert isinstance(gradient, DTensor)
    torch.testing.assert_close(gradient.full_tensor(), w.grad)
    return shapes(backend.reports)


def test_distributed_tensors_as_inputs(pair: Pair) -> None:
    for graphs in pair.run(with_dtensors):
        assert [label for label, *_ in graphs] == ["forward", "backward"]
        assert all(kernels for _, kernels, _ in graphs)
