"""CUDA graphs: graphs that are recorded, refusals with reasons, and replays that return the graph's results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

import fusion
from fusion.codegen.triton.target import TritonTarget
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.joint.seeds import share_seeds
from fusion.runtime import Boxed, recording
from fusion.runtime.recording import draws, refusal


def captured(function: Callable[..., object], *inputs: Callable[[], object]) -> GraphModule:
    with FakeTensorMode(shape_env=ShapeEnv()):
        return make_fx(function)(*(make() for make in inputs))


def why_not(graph: GraphModule, *, backward: bool = False) -> str:
    target = TritonTarget("sm_90")
    return refusal(graph, schedule_graph(graph, target, Trace(None, "test"))[1], backward=backward)


def on_gpu() -> Tensor:
    return torch.empty(4, 3, device="cuda")


def on_second_gpu() -> Tensor:
    return torch.empty(4, 3, device="cuda:1")


def change(x: Tensor) -> Tensor:
    x.t().select(0, 0).mul_(2)
    return x.sum()


def change_several(x: Tensor, y: Tensor) -> Tensor:
    torch._foreach_copy_([y], [x])
    return x + y


REFUSED = [
    (lambda x: x.cpu() + 1, (on_gpu,), "it has tensors on cpu"),
    pytest.param(
        lambda x, y: (x + 1, y * 2),
        (on_gpu, on_second_gpu),
        "it has tensors on cuda:0 and cuda:1",
        marks=pytest.mark.skipif(
            torch.cuda.device_count() == 1, reason="with one GPU, PyTorch fakes no tensors of a second"
        ),
    ),
    (lambda x, y: x + y, (on_gpu, lambda: 2.5), "an input is neither a tensor nor a size"),
    (change, (on_gpu,), "changes its input x_1 in place"),
    (change_several, (on_gpu, on_gpu), "changes its input y_1 in place"),
    (lambda x: x * x.sum().long().item(), (on_gpu,), "aten._local_scalar_dense.default waits for the device"),
    (lambda x, y: x.set_(y) + 1, (on_gpu, on_gpu), "aten.set_.source_Tensor gives an input other memory"),
]


@pytest.mark.parametrize(("function", "inputs", "reason"), REFUSED)
def test_refusals(function: Callable[..., object], inputs: Sequence[Callable[[], object]], reason: str) -> None:
    assert reason in why_not(captured(function, *inputs))


def test_no_refusal() -> None:
    graph = captured(lambda x: torch.rand_like(x).add_(x).sum(), on_gpu)
    assert why_not(graph) == why_not(graph, backward=True) == ""


def test_a_call_that_the_host_gives_a_seed_is_not_recorded() -> None:
    """A library call that a checkpoint repeats runs under a seed on the host; a kernel reads the seed on the device."""

    def checked(function: Callable[[Tensor], Tensor]) -> GraphModule:
        graph = captured(function, on_gpu)
        for node in graph.graph.nodes:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        share_seeds(graph)
        return graph

    assert why_not(checked(torch.poisson)) == "aten.poisson.default draws from a seed that the host reads"
    assert why_not(checked(torch.rand_like)) == ""


def test_graphs_that_draw_random_numbers() -> None:
    assert draws(captured(lambda x: torch.rand_like(x) + x, on_gpu))
    assert draws(captured(lambda x: nn.functional.dropout(x, 0.5), on_gpu))
    assert not draws(captured(lambda x: x * 2, on_gpu))


def test_numbers_of_the_host_are_no_tensors_on_it() -> None:
    assert why_not(captured(lambda x: x + torch.tensor(2.5), on_gpu)) == ""
    assert why_not(captured(lambda x, y: x + y, on_gpu, lambda: torch.tensor(2.5))) == "it has tensors on cpu"


@pytest.mark.parametrize("settings", [{"mode": "reduce-overhead"}, {"options": {"cudagraphs": True}}], ids=str)
def test_the_report_says_that_a_cpu_has_no_cuda_graphs(settings: dict[str, object]) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    f = fusion.fuse(lambda x: x.sin().sum(), **settings)  # type: ignore[call-overload]
    f(x).backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    notes = [note for graph in fusion.report(f).graphs for note in graph.notes]
    assert notes == [f"not recorded as a CUDA graph: {why}" for why in ("it has tensors on cpu", "its forward is not")]


def test_the_mode_reaches_torch_compile() -> None:
    x = torch.randn(5)
    f = torch.compile(lambda x: x.sin() + 1, backend="fusion", mode="reduce-overhead")
    torch.testing.assert_close(f(x), x.sin() + 1)


def test_forward_and_backward_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device, only the arguments of PyTorch's recorder and its callables are tested."""
    reported: list[dict[str, object]] = []

    def cudagraphify(compiled: Boxed, fixed: Sequence[int], **settings: object) -> Boxed:
        reported.append({"fixed": list(fixed), "runs": 0, **settings})
        mine = reported[-1]

        def run(args: list[object]) -> tuple[object, ...]:
            mine["runs"] += 1  # type: ignore[operator]
            return compiled(args)

        return run

    monkeypatch.setattr("fusion.runtime.cudagraph_trees.cudagraphify", cudagraphify)
    monkeypatch.setattr(recording, "_devices", lambda schedule: [torch.device("cuda", 3)])
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    x = torch.randn(5, 3)
    expected = torch.func.functional_call(model, {k: v.clone() for k, v in model.state_dict().items()}, x)
    f = fusion.fuse(model, mode="reduce-overhead", options={"strict": True})
    y = f(x)
    y.sum().backward()
    torch.testing.assert_close(y, expected)
    assert model[1].num_batches_tracked == 1
    forward, backward = reported
    assert [forward["runs"], backward["runs"]] == [1, 1]
    assert [graph["device_index"] for graph in reported] == [3, 3]
    assert [graph["is_backward"] for graph in reported] == [False, True]
    names = [info.name for info in forward["placeholders"]]  # type: ignore[attr-defined]
    assert len(names) == 8 and len(forward["fixed"]) == 7, "all but x"  # type: ignore[arg-type]
    changed = forward["mutated_input_idxs"]
    assert len(changed) == 3 and set(changed) <= set(forward["fixed"])  # type: ignore[arg-type, call-overload]
    assert not backward["mutated_input_idxs"]
    assert all("recorded as a CUDA graph" in graph.notes for graph in fusion.report(f).graphs)


def test_recordings_are_freed_with_the_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else PyTorch's own reset gives back, too
    given_back: list[str] = []
    trees = SimpleNamespace(reset_cudagraph_trees=lambda: given_back.append("all"))
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    fusion.fuse(lambda x: x + 1)(torch.ones(3))
    torch._dynamo.reset()
    assert given_back == []
    fusion.fuse(lambda x: x + 1, mode="reduce-overhead")(torch.ones(3))
    torch._dynamo.reset()
    assert given_back == ["all"]
