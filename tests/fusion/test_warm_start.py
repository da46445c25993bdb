"""Warm starts: what was made of a graph is found again by all that decided it, and by nothing less."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fusion
import fusion.compile
from codegen.c import CTarget
from codegen.numerics import Numerics
from fusion import warm
from fusion.backend import Backend
from fusion.inspect.report import Explanation
from fusion.options import Options
from fusion.warm import form, key, store
from fusion.warm.form import Unwritten, read, write
from fusion.warm.key import MARKS, key_of
from lowering.errors import BuildError, IndexOutOfRange

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone, in use."""
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FUSION_GRAPH_CACHE", "1")
    return tmp_path / "graphs"


def started(
    function: Callable[..., object], *inputs: object, dynamic: bool | None = None, **options: object
) -> tuple[object, Explanation]:
    """The result of a compilation that nothing is left of in this process, and its report."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = Backend(Options.read(None, {"strict": True, **options}))
    result = torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    if isinstance(result, Tensor) and result.requires_grad:
        result.sum().backward()
    return result, Explanation(tuple(backend.reports))


def fresh(tensor: Tensor) -> Tensor:
    """A copy in the same strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def notes(found: Explanation) -> list[str]:
    return [note for graph in found.graphs for note in graph.notes]


def no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> object:
        raise AssertionError("lowered or scheduled again")

    monkeypatch.setattr(fusion.compile, "schedule_graph", fail)


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
    second, found = started(function, *map(fresh, given), **settings)
    assert torch.equal(torch.nan_to_num(first, 17.0), torch.nan_to_num(second, 17.0))
    assert first.stride() == second.stride()
    assert [graph.notes[-1] for graph in found.graphs] == ["from the cache"] * len(cold.graphs)
    same = [replace(graph, notes=graph.notes[:-1]) for graph in found.graphs]
    assert same == list(cold.graphs)


def test_chunks_are_among_what_is_kept():
    report = started(large_loss, *loss_inputs(), workspace=1 << 16)[1]
    assert any("in chunks" in note for note in notes(report))


def test_gradients_of_a_second_start_are_those_of_the_first(monkeypatch):
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
    """Nodes were taken from a set, whose order is that of their addresses: backward was scheduled anew."""
    given = [torch.randn(64, 16), torch.randn(96, 16), torch.randint(96, (64,))]

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(hidden @ weight.t(), target)

    for start in range(6):
        inputs = [given[0].clone().requires_grad_(), given[1].clone().requires_grad_(), given[2]]
        _, explained = started(loss, *inputs, workspace=1 << 10)
        assert [("from the cache" in part.notes) for part in explained.graphs] == [start > 0] * 2


def test_a_failed_check_names_the_line_of_the_user_at_a_second_start_too():
    table, positions = torch.randn(4, 3), torch.tensor([0, 9])
    told = []
    for _ in range(2):
        with pytest.raises(IndexOutOfRange) as failure:
            started(lambda table, positions: table[positions] * 2, table, positions)
        told.append(str(failure.value))
    assert told[0] == told[1]
    assert "test_warm_start.py" in told[0]


def test_sizes_that_were_not_there_run_as_kept(monkeypatch):
    small, large = (torch.randn(5, 7), torch.randn(7, 9)), (torch.randn(6, 11), torch.randn(11, 4))
    started(softmax_of_products, *small, dynamic=True)
    no_compilation(monkeypatch)
    torch._dynamo.reset()
    fused = torch.compile(softmax_of_products, backend=Backend(Options.read(None, {"strict": True})), dynamic=True)
    for inputs in (small, large):
        torch.testing.assert_close(fused(*inputs), softmax_of_products(*inputs))


@pytest.mark.parametrize(
    "options", [{"graph_cache": False}, {"dump": "dumped"}, {"numerics": "strict"}, {"workspace": 1 << 20}]
)
def test_other_options_compile_anew(options, tmp_path):
    if "dump" in options:
        options = {"dump": tmp_path / "dumped"}
    x = torch.randn(4, 3)
    started(torch.sigmoid, x)
    assert notes(started(torch.sigmoid, x, **options)[1]) == []
    assert notes(started(torch.sigmoid, x)[1]) == ["from the cache"]


def test_nothing_is_kept_where_that_is_not_wished(cache, monkeypatch):
    monkeypatch.setenv("FUSION_GRAPH_CACHE", "0")
    started(torch.sigmoid, torch.randn(4, 3))
    assert not cache.exists()


# The key ------------------------------------------------------------------------------------------------------------


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
    known = {'"val"', '"stack_trace"', '"nn_module_stack"', *(f'"{mark}"' for mark in MARKS), "ONLY_STORED"}
    found: set[str] = set()
    for folder in ("lowering", "fusion/schedule", "codegen"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"\bmeta(?:\.get\(|\[)([\w\"]+)", path.read_text(encoding="utf-8")))
    assert '"val"' in found
    assert found <= known


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
    for name, changed in (("_sources", "other"), ("_versions", "other"), ("_environment", "other")):
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


def test_the_sources_of_the_compiler_are_read_whole(monkeypatch):
    paths: list[Path] = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: paths.append(path) or whole(path))
    key._sources.__wrapped__()
    assert {ROOT / name for name in ("fusion/compile.py", "codegen/build.py", "lowering/rules/view.py")} <= {*paths}


# What is refused ----------------------------------------------------------------------------------------------------


def test_a_graph_that_holds_another_one_is_not_kept_and_says_so(cache):
    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) * 2

    _, report = started(branch, torch.ones(3))
    assert any(note.startswith("not kept in the cache: ") for note in notes(report))
    assert not cache.exists()


def test_what_is_known_of_sizes_after_compiling_is_known_before_it(cache, monkeypatch):
    made = iter(["first", "second"])
    monkeypatch.setattr(warm, "key_of", lambda *asked: next(made))
    assert notes(started(torch.sigmoid, torch.ones(3))[1]) == [
        "not kept in the cache: more is known of its sizes since it was compiled"
    ]
    assert not cache.exists()


@pytest.mark.parametrize("value", [object(), lambda x: x, torch.ones(1 << 17), os.system, torch.ones(2).to_sparse()])
def test_a_value_without_a_form_is_refused(value):
    with pytest.raises(Unwritten):
        write([value], {})


def test_no_text_runs_anything():
    for row in (["function", "os", "system"], ["function", "torch", "Tensor"], ["sympy", "os", "system"]):
        with pytest.raises((ValueError, KeyError, TypeError)):
            read(form.json.dumps([row]), {})
    with pytest.raises(ValueError, match="no type of elements"):
        read('[["torch","load"]]', {})


def test_a_value_of_ten_thousand_levels_is_written_and_read():
    value: object = ()
    for level in range(10_000):
        value = (value, level % 3)
    text = write(value, {})
    assert write(read(text, {}), {}) == text


# Files --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "exchanged"])
def test_a_damaged_entry_is_made_anew_with_a_note(harm, cache):
    x = torch.randn(4, 3)
    started(torch.sigmoid, x)
    started(torch.tanh, x)
    first, second = sorted(cache.iterdir())
    if harm == "exchanged":
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
    for path in (first, second):
        content = bytearray(path.read_bytes())
        if harm == "flipped":
            content[len(content) // 2] ^= 1
        path.write_bytes({"cut": content[:-3], "empty": b""}.get(harm, content))
    result, report = started(torch.sigmoid, x)
    assert torch.equal(result, torch.sigmoid(x)) or torch.allclose(result, torch.sigmoid(x))
    assert notes(report) == ["its entry in the cache was damaged"]
    assert notes(started(torch.sigmoid, x)[1]) == ["from the cache"]


def test_an_entry_of_another_user_is_not_read(monkeypatch):
    store.put("key", "text")
    assert store.get("key") == "text"
    monkeypatch.setattr(store, "is_own", lambda status: False)
    with pytest.raises(store.Damaged):
        store.get("key")


def test_a_write_that_is_interrupted_leaves_what_was_there(cache, monkeypatch):
    store.put("key", "before")

    def interrupted(*paths: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put("key", "after")
    assert store.get("key") == "before"
    assert len(list(cache.iterdir())) == 1


def test_a_full_disk_is_a_note_and_the_result_is_there(monkeypatch):
    def full(key: str, text: str) -> None:
        raise BuildError("no space left")

    monkeypatch.setattr(warm, "put", full)
    result, report = started(torch.relu, torch.ones(3))
    assert torch.equal(result, torch.ones(3))
    assert notes(report) == ["not kept in the cache: no space left"]


def test_what_nobody_asked_for_longest_is_removed(cache, monkeypatch):
    for number, name in enumerate(("old", "asked", "new")):
        store.put(name, name)
        os.utime(cache / name, (number, number))
    assert store.get("old") == "old"  # asked for now
    monkeypatch.setattr(store, "LIMIT", 3 * (cache / "old").stat().st_size + 8)
    store.put("last", "last")
    assert {path.name for path in cache.iterdir()} == {"old", "new", "last"}


def test_writers_and_readers_at_once_see_whole_entries():
    texts = [str(k) * 5000 for k in range(8)]
    seen: list[str | None] = []

    def work(text: str) -> None:
        for _ in range(10):
            store.put("key", text)
            seen.append(store.get("key"))

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 80
    assert {*seen} <= {*texts}


PROCESS = """
import torch, fusion
f = fusion.fuse(lambda x: torch.softmax(x * 3, -1), options={"strict": True})
print(round(float(f(torch.arange(12.0).reshape(3, 4)).sum()), 4), *fusion.report(f).graphs[0].notes)
"""


@pytest.mark.slow
def test_two_processes_at_once_and_a_third(cache):
    command = [sys.executable, "-c", PROCESS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate()[0].strip() for process in both]
    assert {text.removesuffix(" from the cache") for text in told} == {"3.0"}
    third = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert third.stdout.strip() == "3.0 from the cache"
    assert len(list(cache.iterdir())) == 1
