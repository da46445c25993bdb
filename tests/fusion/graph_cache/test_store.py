"""The cache's files: which graphs are stored, and the handling of damaged and concurrently written files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sympy
import torch
from torch import Tensor

from fusion import graph_cache as warm
from fusion.graph_cache.key import key_of
from fusion.graph_cache.serialise import Unwritten, read, write
from fusion.lowering.errors import BuildError
from tests.fusion.graph_cache.starts import notes, started

ROOT = Path(__file__).resolve().parents[3]


def test_only_the_inner_graphs_of_a_graph_are_kept_and_it_reports_this(cache):
    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) * 2

    for first in (True, False):
        _, report = started(branch, torch.ones(3))
        *bodies, graph = report.graphs
        assert any(note.startswith("not kept in the cache: ") for note in graph.notes)
        assert [warm.HIT in body.notes for body in bodies] == [not first] * 2


def test_a_graph_whose_sizes_are_guarded_while_compiling_is_not_kept(cache, monkeypatch):
    monkeypatch.setattr(warm, "key_and_facts", lambda *asked: ("first", True))
    monkeypatch.setattr(warm, "key_of", lambda *asked: "second")
    assert notes(started(torch.sigmoid, torch.ones(3))[1]) == [
        "not kept in the cache: guards on its sizes were added while it was compiled"
    ]
    assert not cache.exists()


def test_only_keys_of_symbolic_sizes_are_computed_again(cache, monkeypatch):
    again: list[object] = []
    monkeypatch.setattr(warm, "key_of", lambda *asked: again.append(asked) or key_of(*asked))
    assert not notes(started(torch.sigmoid, torch.ones(3))[1])
    assert not again
    started(torch.sigmoid, torch.ones(3), dynamic=True)
    assert again


@pytest.mark.parametrize("value", [object(), lambda x: x, torch.ones(1 << 17), os.system, torch.ones(2).to_sparse()])
def test_a_value_without_a_form_is_refused(value):
    with pytest.raises(Unwritten):
        write([value], {})


RUNS = "__import__('pathlib').Path({path!r}).write_text('')"
"""What sympy evaluates where it is given a text for an expression."""


@pytest.mark.parametrize(
    "kind",
    [
        *(("sympy.core.add", "Add"), ("sympy.core.mul", "Mul"), ("sympy.functions.elementary.integers", "floor")),
        *(("sympy.functions.elementary.trigonometric", "sin"), ("fusion.lowering.ir.division", "FloorDiv")),
        *(("torch.utils._sympy.functions", "FloorDiv"), ("sympy.core.sympify", "sympify"), ("os", "system")),
    ],
)
def test_no_text_becomes_an_expression(kind, tmp_path):
    text = RUNS.format(path=str(tmp_path / "ran"))
    for count in (1, 2):
        rows = [["plain", "str", text], ["sympy", *kind, *[0] * count]]
        with pytest.raises((TypeError, KeyError)):
            read(json.dumps(rows), {})
    with pytest.raises(TypeError):
        read(json.dumps([["plain", "str", text], ["computed", 0]]), {})
    assert not (tmp_path / "ran").exists()


def test_no_text_names_what_is_not_listed():
    for row in (
        *(["function", "os", "system"], ["function", "torch", "Tensor"], ["torch", "load"], ["torch", "hub"]),
        *(["operation", "aten.add"], ["operation", "__class__.mro.x"], ["operation", "aten.add.Tensor.__call__"]),
        *(["tensor", "load", "[[1],[1]]", ""], ["kind", "Popen"], ["enum", "Popen", "PIPE"], ["pickle", ""]),
    ):
        with pytest.raises((ValueError, KeyError, TypeError)):
            read(json.dumps([row]), {})


def test_a_value_of_ten_thousand_levels_is_written_and_read():
    value: object = ()
    for level in range(10_000):
        value = (value, level % 3)
    text = write(value, {})
    assert write(read(text, {}), {}) == text


READER = """
import sys
from fusion.graph_cache.key import key_of
from fusion.graph_cache.serialise import read
read(sys.argv[1], {})
print("sympy.tensor.tensor" in sys.modules)
"""


def test_sums_are_read_back_without_sympys_tensor_modules():
    x, y = sympy.symbols("x y", integer=True)
    sums = [x + 1, x * 2 + y * 3 + x * y, 3 * (x + y), x - y, 2 * x]
    for each in (*sums, sympy.floor((x + y) / 2), x**2 - y, sympy.Max(x, y + 1)):
        assert read(write(each, {}), {}) == each
    command = [sys.executable, "-c", READER, write(sums, {})]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "exchanged"])
def test_a_damaged_entry_is_compiled_anew_with_a_note(harm, cache):
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


def test_a_full_disk_is_a_note_and_the_result_is_there(monkeypatch):
    def full(key: str, text: str, *folder: object) -> None:
        raise BuildError("no space left")

    monkeypatch.setattr(warm, "put", full)
    result, report = started(torch.relu, torch.ones(3))
    assert torch.equal(result, torch.ones(3))
    assert notes(report) == ["not kept in the cache: no space left"]


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
    reported = [process.communicate()[0].strip() for process in both]
    assert {text.removesuffix(" from the cache") for text in reported} == {"3.0"}
    third = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert third.stdout.strip() == "3.0 from the cache"
    assert len(list(cache.iterdir())) == 1
