"""The key of a region covers all inputs of its compilation, and nothing that differs between two starts."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fusion.codegen.c.target import CTarget
from fusion.codegen.numerics import Numerics
from fusion.graph_cache import key
from fusion.graph_cache import region_key as captured
from fusion.graph_cache.region_key import key_of_region
from fusion.graph_cache.serialise import Unwritten
from fusion.options import Options, Requirements

ROOT = Path(__file__).resolve().parents[3]
ONE = torch.ones(4, 6)
OTHER_STRIDES = {
    "guess_tangent_strides_as_outputs": not torch._functorch.config.guess_tangent_strides_as_outputs,
}
"""The setting that versions of PyTorch do not have by default."""


def key_for(
    function: Callable[..., object],
    *inputs: object,
    dynamic: bool = False,
    options: Options | None = None,
    target: CTarget | None = None,
    asked: object = None,
) -> str:
    """Return the key of the region that Dynamo captures from a function."""
    keys: list[str] = []

    def backend(graph: fx.GraphModule, given: Sequence[object]) -> fx.GraphModule:
        keys.append(key_of_region(graph, given, asked, options or Options(), [target or CTarget()]))
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    (result,) = keys
    return result


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def wrapped(amount: object) -> Callable[[Tensor], Tensor]:
    return lambda x: x * torch.tensor(amount)


def sine(x: Tensor) -> Tensor:
    return x.sin()


def sine_elsewhere(x: Tensor) -> Tensor:
    return x.sin()


def of_both(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def in_bfloat16(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.t()


def in_float16(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return x @ x.t()


def grown(x: Tensor) -> Tensor:
    return x.sin() if x.shape[0] < 100 else x


def again(x: Tensor) -> Tensor:
    return checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False)


def again_otherwise(x: Tensor) -> Tensor:
    return checkpoint(lambda x: x.cos().exp(), x, use_reentrant=False)


def parted(x: Tensor) -> Tensor:
    return x[..., 1:3]


def parted_otherwise(x: Tensor) -> Tensor:
    return x[..., 1:4]


def within(context: contextlib.AbstractContextManager[object], *inputs: object) -> str:
    with context:
        return key_for(sine, *(inputs or (ONE,)))


@contextlib.contextmanager
def changed(change: Callable[[object], object], before: object, after: object) -> Iterator[None]:
    change(after)
    try:
        yield
    finally:
        change(before)


DIFFERENT: dict[str, Callable[[], str]] = {
    "sine": lambda: key_for(sine, ONE),
    "line": lambda: key_for(sine_elsewhere, ONE),
    "size": lambda: key_for(sine, torch.ones(4, 7)),
    "strides": lambda: key_for(sine, torch.ones(6, 4).t()),
    "dtype": lambda: key_for(sine, ONE.double()),
    "gradient": lambda: key_for(sine, ONE.clone().requires_grad_()),
    "parameter": lambda: key_for(sine, nn.Parameter(ONE.clone())),
    "no leaf": lambda: key_for(sine, ONE.clone().requires_grad_() * 1),
    "view": lambda: key_for(sine, ONE[:]),
    "view of more": lambda: key_for(sine, torch.ones(5, 6)[:4]),
    "start": lambda: key_for(sine, torch.ones(5, 6)[1:]),
    "symbols": lambda: key_for(sine, ONE, dynamic=True),
    "other hint": lambda: key_for(sine, torch.ones(5, 6), dynamic=True),
    "guard": lambda: key_for(grown, ONE, dynamic=True),
    "factor": lambda: key_for(scaled(1.5), ONE),
    "zero": lambda: key_for(scaled(0.0), ONE),
    "negative zero": lambda: key_for(scaled(-0.0), ONE),
    "constant": lambda: key_for(wrapped([1.0] * 6), ONE),
    "other constant": lambda: key_for(wrapped([2.0] * 6), ONE),
    "two": lambda: key_for(of_both, ONE, ONE.clone()),
    "one memory": lambda: key_for(of_both, (base := torch.ones(8, 6))[:4], base[4:]),
    "two memories": lambda: key_for(of_both, torch.ones(8, 6)[:4], torch.ones(8, 6)[4:]),
    "bfloat16": lambda: key_for(in_bfloat16, ONE),
    "float16": lambda: key_for(in_float16, ONE),
    "checkpoint": lambda: key_for(again, ONE),
    "other checkpoint": lambda: key_for(again_otherwise, ONE),
    "slice": lambda: key_for(parted, ONE),
    "other slice": lambda: key_for(parted_otherwise, ONE),
    "no gradients": lambda: within(torch.no_grad()),
    "autocast": lambda: within(torch.autocast("cpu", dtype=torch.bfloat16)),
    "other autocast": lambda: within(torch.autocast("cpu", dtype=torch.float16)),
    "anomalies": lambda: within(torch.autograd.detect_anomaly(check_nan=False)),
    "attention": lambda: within(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)),
    "deterministic": lambda: within(changed(torch.use_deterministic_algorithms, False, True)),
    "default dtype": lambda: within(changed(torch.set_default_dtype, torch.float32, torch.float64)),
    "precision": lambda: within(changed(torch.set_float32_matmul_precision, "highest", "medium")),
    "benchmark": lambda: within(torch.backends.cudnn.flags(benchmark=True)),
    "libraries": lambda: within(torch.backends.mkldnn.flags(enabled=False)),
    "partition": lambda: within(torch._functorch.config.patch(activation_memory_budget=0.5)),
    "tangents": lambda: within(torch._functorch.config.patch(**OTHER_STRIDES)),
    "workspace": lambda: key_for(sine, ONE, options=Options(workspace=1)),
    "numerics": lambda: key_for(sine, ONE, options=Options(numerics="strict")),
    "graphs": lambda: key_for(sine, ONE, options=Options(cudagraphs=True)),
    "target": lambda: key_for(sine, ONE, target=CTarget(Numerics(tf32=True))),
}


def test_each_part_is_part_of_the_key():
    keys = {what: make() for what, make in DIFFERENT.items()}
    result: dict[str, str] = {}
    for what, built in keys.items():
        assert built not in result, f"{what} is as {result.get(built)}"
        result[built] = what
    for what in ("sine", "one memory", "symbols", "checkpoint", "autocast"):
        assert DIFFERENT[what]() == keys[what]


def test_the_compiler_and_the_machine_are_part_of_the_key(monkeypatch):
    keys = {key_for(sine, ONE)}
    for name in ("compiler_version", "_versions", "_environment"):
        with monkeypatch.context() as context:
            context.setattr(key, name, lambda: "other")
            keys.add(key_for(sine, ONE))
    with monkeypatch.context() as context:
        context.setattr(CTarget, "identity", "another machine")
        keys.add(key_for(sine, ONE))
    with monkeypatch.context() as context:
        context.setenv("CC", "another compiler")
        keys.add(key_for(sine, ONE))
    assert len(keys) == 6
    assert key_for(sine, ONE) in keys


def test_options_without_effect_are_not_part_of_the_key():
    asked = Options()
    required = replace(asked, require=Requirements(kernels=1))
    for other in (replace(asked, strict=True), replace(asked, graph_cache=not asked.graph_cache), required):
        assert key_for(sine, ONE, options=other) == key_for(sine, ONE, options=asked)


def test_each_option_decides_unless_it_is_known_not_to():
    assert {each.name for each in captured.fields(Options)} >= captured._NOT_DECIDING
    assert {"dump", "override", "strict", "graph_cache", "require"} == captured._NOT_DECIDING


@contextlib.contextmanager
def another_gradient() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("hypot", lambda x, y: x, "AutogradCPU")
        yield


@contextlib.contextmanager
def another_cast() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("hypot", lambda x, y: x, "AutocastCPU")
        yield


@contextlib.contextmanager
def other_parts() -> Iterator[None]:
    operation = torch.ops.aten.special_ndtr.default
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(torch._decomp.decomposition_table, operation, lambda x: x * 2)
        yield


def saved_otherwise() -> contextlib.AbstractContextManager[object]:
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


@pytest.mark.parametrize("context", [another_gradient, another_cast, other_parts, saved_otherwise])
def test_changes_of_the_program_to_tracing_have_no_key(context):
    before = key_for(sine, ONE)
    graphs: list[fx.GraphModule] = []
    torch._dynamo.reset()
    torch.compile(sine, backend=lambda graph, inputs: graphs.append(graph) or graph)(ONE)
    with context(), pytest.raises(Unwritten):
        key_of_region(graphs[0], [ONE], None, Options(), [CTarget()])
    assert key_for(sine, ONE) == before


def test_kernels_that_pytorch_registers_at_a_first_batch_keep_the_key():
    before = key_for(sine, ONE)
    torch.vmap(torch.sin)(torch.ones(2, 3))
    assert any(name.endswith("/FuncTorchBatched") for name in torch.library._impls)
    assert key_for(sine, ONE) == before


def test_functions_and_methods_of_the_program_in_the_place_of_pytorchs_have_no_key(monkeypatch):
    """The function has the name of PyTorch's, but the graph calls the program's own."""
    for owner, name, function in ((torch.Tensor, "sin", lambda x: x.sin()), (functional, "relu", functional.relu)):
        assert key_for(function, ONE)
        graphs: list[fx.GraphModule] = []
        torch._dynamo.reset()
        torch.compile(function, backend=lambda graph, inputs, graphs=graphs: graphs.append(graph) or graph)(ONE)
        own = getattr(owner, name)
        replaced = functools.wraps(own)(lambda *given, own=own: own(*given) * 2)
        with monkeypatch.context() as context:
            context.setattr(owner, name, replaced)
            for node in graphs[0].graph.nodes:
                node.target = replaced if node.target is own else node.target
            with pytest.raises(Unwritten, match=f"{name}, which is not PyTorch's"):
                key_of_region(graphs[0], [ONE], None, Options(), [CTarget()])


@pytest.mark.parametrize("mark", ["custom", "stream", "is_wrapped"])
def test_unknown_metadata_of_a_node_has_no_key(mark):
    graphs: list[fx.GraphModule] = []
    torch._dynamo.reset()
    torch.compile(sine, backend=lambda graph, inputs: graphs.append(graph) or graph)(ONE)
    next(iter(graphs[0].graph.nodes)).meta[mark] = "marked"
    with pytest.raises(Unwritten, match=mark):
        key_of_region(graphs[0], [ONE], None, Options(), [CTarget()])


PROCESS = """
import torch
from torch import nn
from torch.nn import functional as F
from tests.fusion.graph_cache.test_captured import key_for
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(64, 5))
print(key_for(lambda x: F.cross_entropy(model(x), torch.tensor([1, 2])), torch.ones(2, 3, 6, 6)))
layer = nn.Linear(16, 5)
print(key_for(lambda x: F.gelu(layer(x)).softmax(0), torch.ones(2, 5, 16), dynamic=True))
"""


def test_two_processes_have_the_same_keys():
    reported = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROCESS]
        reported.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(reported) == 1
    assert len(reported.pop().split()) == 2
