"""The key of a graph covers all inputs of its compilation."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.codegen.c.target import CTarget
from fusion.codegen.numerics import Numerics
from fusion.graph_cache import key
from fusion.graph_cache.key import MARKS, key_of
from fusion.options import Options

ROOT = Path(__file__).resolve().parents[3]


def traced(function: Callable[..., object], *inputs: object, mode: str = "fake") -> fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(*inputs)


def key_for(function: Callable[..., object], *inputs: object, mode: str = "fake") -> str:
    return key_of(traced(function, *inputs, mode=mode), "inference", Options(), CTarget())


def scaled(factor: object) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.mul(x, factor)  # type: ignore[arg-type]  # bools are numbers, too


ONE = torch.ones(4, 6)

DIFFERENT = {
    "operation": lambda: key_for(torch.sin, ONE),
    "cosine": lambda: key_for(torch.cos, ONE),
    "size": lambda: key_for(torch.sin, torch.ones(4, 7)),
    "rank": lambda: key_for(torch.sin, torch.ones(4, 6, 1)),
    "strides": lambda: key_for(torch.sin, torch.ones(6, 4).t()),
    "start": lambda: key_for(torch.sin, torch.ones(5, 6)[1:]),
    "dtype": lambda: key_for(torch.sin, ONE.double()),
    "factor": lambda: key_for(scaled(1.5), ONE),
    "whole factor": lambda: key_for(scaled(1), ONE),
    "float factor": lambda: key_for(scaled(1.0), ONE),
    "true": lambda: key_for(scaled(True), ONE),
    "zero": lambda: key_for(scaled(0.0), ONE),
    "negative zero": lambda: key_for(scaled(-0.0), ONE),
    "constant": lambda: key_for(lambda x: x * torch.tensor(2.0), ONE),
    "other constant": lambda: key_for(lambda x: x * torch.tensor(3.0), ONE),
    "two inputs": lambda: key_for(lambda x, y: x + y, ONE, ONE.clone()),
    "order": lambda: key_for(lambda x, y: y + x, ONE, ONE.clone()),
    "one memory": lambda: key_for(lambda x, y: x + y, (base := torch.ones(8, 6))[:4], base[4:]),
    "symbols": lambda: key_for(torch.sin, ONE, mode="symbolic"),
    "equal symbols": lambda: key_for(
        lambda x: x + x.t() if x.shape[0] == x.shape[1] else x, ONE[:, :4], mode="symbolic"
    ),
    "other hint": lambda: key_for(torch.sin, torch.ones(5, 6), mode="symbolic"),
    "guard": lambda: key_for(lambda x: x.sin() if x.shape[0] < 100 else x, ONE, mode="symbolic"),
    "line": lambda: key_of(elsewhere(), "inference", Options(), CTarget()),
}


def elsewhere() -> fx.GraphModule:
    """The graph of a sine, of another line."""
    graph = traced(torch.sin, ONE)
    for node in graph.graph.nodes:
        node.meta["stack_trace"] = 'File "somewhere.py", line 7, in f'
    return graph


def test_each_part_of_a_graph_is_part_of_its_key():
    keys = {what: make() for what, make in DIFFERENT.items()}
    assert len(set(keys.values())) == len(keys)
    assert keys == {what: make() for what, make in DIFFERENT.items()}


@pytest.mark.parametrize("mark", MARKS)
def test_marks_of_nodes_are_part_of_the_key(mark):
    graph = traced(torch.sin, ONE)
    before = key_of(graph, "inference", Options(), CTarget())
    next(iter(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default))).meta[mark] = "marked"
    assert key_of(graph, "inference", Options(), CTarget()) != before


def test_all_that_lowering_reads_of_a_node_is_in_the_key():
    known = {
        '"val"',
        '"stack_trace"',
        '"nn_module_stack"',
        '"fwd_nn_module_stack"',
        *(f'"{mark}"' for mark in MARKS),
        '"source_fn_stack"',
        "ONLY_STORED",
    }
    result: set[str] = set()
    for folder in ("lowering", "fusion/schedule", "codegen"):
        for path in (ROOT / folder).rglob("*.py"):
            result |= set(re.findall(r"\bmeta(?:\.get\(|\[)([\w\"]+)", path.read_text(encoding="utf-8")))
    assert '"val"' in result
    assert result <= known


def test_surroundings_are_part_of_the_key(monkeypatch):
    graph, target, options = traced(torch.sin, ONE), CTarget(), Options()
    keys = [key_of(graph, "inference", options, target)]

    def add(label: str = "inference", options: Options = options, target: CTarget = target) -> None:
        keys.append(key_of(graph, label, options, target))

    add(label="forward")
    add(options=replace(options, workspace=1))
    add(options=replace(options, numerics="strict"))
    add(options=replace(options, cudagraphs=True))
    add(target=CTarget(Numerics(tf32=True)))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    add()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    add()
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    add()
    torch.set_default_dtype(torch.float32)
    for name, changed in (("compiler_version", "other"), ("_versions", "other"), ("_environment", "other")):
        with monkeypatch.context() as context:
            context.setattr(key, name, lambda changed=changed: changed)
            add()
    with monkeypatch.context() as context:
        context.setattr(CTarget, "identity", "another machine")
        add()
    with monkeypatch.context() as context:
        context.setenv("CC", "another compiler")
        add()
    assert len(set(keys)) == len(keys)
    assert key_of(graph, "inference", options, target) == keys[0]


def test_all_sources_of_the_compiler_are_read(monkeypatch):
    paths: list[Path] = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: paths.append(path) or whole(path))
    key.compiler_version.__wrapped__()
    folders = [ROOT / name for name in ("fusion", "codegen", "lowering")]
    written = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".c", ".h")]
    assert {ROOT / "codegen/build.py", ROOT / "codegen/triton/launch/direct.c"} <= {*written}
    assert sorted(path.resolve() for path in paths) == sorted(written)
