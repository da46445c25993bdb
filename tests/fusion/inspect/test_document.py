"""The data of a report: every field has the type that the structure says, and numbers point at what they name."""

from __future__ import annotations

import ast
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn
from typing_extensions import is_typeddict

import fusion
from fusion.backend import Backend
from fusion.cli.programs import load_program
from fusion.inspect.document import VERSION, Document
from fusion.inspect.document.remedies import NO_RULE, UNKNOWN, remedy
from fusion.inspect.explanation import Explanation
from fusion.options import Options
from fusion.schedule.clusters import legality

FRESH = {"graph_cache": False}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.relu(self.out(self.norm(x)))
        return torch.softmax(x, -1)


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sort(-1).values


@pytest.fixture(scope="module")
def document() -> Document:
    return fusion.explain(Blocks(3), options=FRESH)(torch.randn(8, 64)).json(artefacts=True)


def misfits(value: Any, kind: Any, at: str = "") -> Iterator[str]:
    """Yield where `value` is not of a type: TypedDicts have exactly their fields."""
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            yield f"{at}: {sorted(value) if isinstance(value, dict) else value!r} is no {kind.__name__}"
            return
        for name, inner in hints.items():
            yield from misfits(value[name], inner, f"{at}.{name}")
    elif get_origin(kind) is list:
        if not isinstance(value, list):
            yield f"{at}: {value!r} is no list"
            return
        for number, each in enumerate(value):
            yield from misfits(each, get_args(kind)[0], f"{at}[{number}]")
    elif get_origin(kind) in (Union, types.UnionType):
        if all([*misfits(value, each, at)] for each in get_args(kind)):
            yield f"{at}: {value!r} is no {kind}"
    elif not (isinstance(value, kind) or (kind is float and type(value) is int)):
        yield f"{at}: {value!r} is no {kind.__name__}"


def test_every_field_has_its_type_and_survives_json(document: Document) -> None:
    assert document["version"] == VERSION == 1
    assert not [*misfits(document, Document)]
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_a_field_of_another_type_is_noticed(document: Document) -> None:
    graph = {**document["graphs"][0], "label": None}
    assert [*misfits({**document, "graphs": [graph]}, Document)] == [".graphs[0].label: None is no str"]


def test_equal_kernels_are_one_entry_with_their_launches(document: Document) -> None:
    launches = [len(kernel["launches"]) for kernel in document["kernels"]]
    assert max(launches) == 3 and sum(launches) == sum(
        step["kind"] == "kernel" for graph in document["graphs"] for step in graph["steps"]
    )
    for number, kernel in enumerate(document["kernels"]):
        for graph, step in kernel["launches"]:
            assert document["graphs"][graph]["steps"][step]["kernel"] == number


def test_operations_and_steps_point_at_each_other(document: Document) -> None:
    (graph, *_) = document["graphs"]
    for number, step in enumerate(graph["steps"]):
        assert step["operations"] and all(number in graph["operations"][k]["steps"] for k in step["operations"])
    computed = [operation for operation in graph["operations"] if operation["kind"] != "view"]
    assert all(operation["steps"] for operation in computed)


def test_places_are_lines_of_the_program(document: Document) -> None:
    (graph, *_) = document["graphs"]
    relu = next(each for each in graph["operations"] if each["name"] == "relu")
    place = relu["place"]
    assert place["file"] is not None and place["line"] is not None and place["module"] == "layers.0"
    file = document["files"][place["file"]]
    excerpt = next(each for each in file["excerpts"] if 0 <= place["line"] - each["first"] < len(each["lines"]))
    assert file["path"] == __file__ and "torch.relu" in excerpt["lines"][place["line"] - excerpt["first"]]


def test_artefacts_name_lines_of_the_source(document: Document) -> None:
    for kernel in document["kernels"]:
        (artefact,) = kernel["artefacts"]
        lines = artefact["text"].splitlines()
        assert artefact["stage"] == "s" and len(lines) == len(artefact["lines"]) and not kernel["failed"]
        assert max(artefact["lines"]) <= len(kernel["source"].splitlines()) and any(artefact["lines"])


def test_lines_of_a_source_are_those_of_the_operations_between_their_ends() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scaled = x * y
        return torch.exp(scaled - scaled.amax(-1, keepdim=True))

    found = fusion.explain(program, options=FRESH)(torch.randn(8, 96), torch.randn(8, 96)).json()
    (graph,), (kernel,) = found["graphs"], found["kernels"]
    (step,) = graph["steps"]
    names = {
        line.strip(): [graph["operations"][k]["name"] for k in operations]
        for line, operations in zip(kernel["source"].splitlines(), step["lines"], strict=True)
    }
    assert any("exp_float(" in line and computed == ["mul", "sub", "exp"] for line, computed in names.items())
    assert any(
        line.startswith("max0_shares[l] = t0 >") and computed == ["mul", "amax"] for line, computed in names.items()
    )
    assert names["return 0;"] == []


def test_refusals_come_with_their_ends_and_a_remedy_the_most_expensive_first(document: Document) -> None:
    refusals = document["graphs"][0]["refusals"]
    costs = [refusal["microseconds"] for refusal in refusals]
    assert costs == sorted(costs, reverse=True) and all(refusal["remedy"] for refusal in refusals)
    steps = document["graphs"][0]["steps"]
    for refusal in refusals:
        start, end = refusal["from_step"], refusal["to_step"]
        assert start is not None and end is not None and start < end
        assert refusal["producer"] in steps[start]["writes"] and refusal["producer"] in steps[end]["reads"]


def test_steps_have_prices_and_the_device_its_rates(document: Document) -> None:
    (graph, *_) = document["graphs"]
    device = graph["device"]
    assert device is not None and device["flops"] > 0 and device["bandwidth"]
    for step in graph["steps"]:
        price = step["price"]
        assert (price is None) == (step["kind"] == "call")
        if price is not None and step["predicted"] is not None:
            parts = price["launch"] + price["memory"] + price["products"] + price["scalars"] + price["epilogue"]
            assert step["predicted"] == pytest.approx(parts - price["hidden"])


def test_passes_name_what_they_changed(document: Document) -> None:
    passes = document["graphs"][0]["passes"]
    inlined = next(each for each in passes if each["name"] == "inline_cheap_maps")
    assert inlined["removed"]["count"] == len(inlined["removed"]["names"]) > 0 and inlined["milliseconds"] > 0
    assert "relu" in inlined["removed"]["names"]


def test_measured_times_stand_beside_predicted_ones() -> None:
    found = fusion.explain(lambda x: x.exp(), measure=True)(torch.randn(64)).json()
    (step,) = found["graphs"][0]["steps"]
    assert step["measured"] is not None and step["measured"] > 0 and step["predicted"] is not None


def test_a_region_that_runs_eagerly_has_calls_alone() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return y + 1

    fused, memory = fusion.fuse(program, options=FRESH), torch.arange(8.0)
    fused(torch.ones(5), torch.ones(5))
    with pytest.warns(fusion.FusionWarning, match="overlap"):
        fused(memory[:5], memory[3:])
    found = fusion.report(fused).json()
    _, graph = found["graphs"]
    assert "overlap" in graph["failure"] and {step["kind"] for step in graph["steps"]} == {"call"}
    assert not [*misfits(found, Document)]


def test_reports_of_both_passes_and_of_chunks_are_documents() -> None:
    x, w = torch.randn(4, 70, 260, requires_grad=True), torch.randn(1003, 260, requires_grad=True)
    backend = Backend(Options(strict=True, workspace=1 << 17, graph_cache=False))
    program = torch.compile(cross_entropy, backend=backend, dynamic=False)
    program(x, w, torch.randint(0, 1003, (4, 70))).backward()
    found = Explanation(tuple(backend.reports)).json()
    assert not [*misfits(found, Document)]
    assert [graph["label"] for graph in found["graphs"]] == ["forward", "backward"]
    inside = [step for step in found["graphs"][0]["steps"] if step["runs"] > 1]
    assert inside and all(name.startswith("chunk ") for step in inside for name in step["writes"])


def cross_entropy(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(nn.functional.linear(x, w).view(-1, 1003), y.view(-1))


def test_a_report_from_the_cache_is_the_same_document() -> None:
    x = torch.randn(16, 48)

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 1.03125, -1)

    first, second = (fusion.explain(program)(x).json() for _ in range(2))
    for found in (first, second):
        for graph in found["graphs"]:
            graph["passes"], graph["notes"] = [], []
    assert first == second


def test_lines_are_those_of_the_file_that_ran_also_with_a_cache(tmp_path: Path) -> None:
    shown = []
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "scaled.py"
        file.write_text(f"def scaled(x):\n    return x.exp() * 1.0625  # {folder}\n")
        found = fusion.explain(load_program(f"{file}:scaled"))(torch.ones(5)).json()
        shown += [excerpt["lines"][1] for file in found["files"] for excerpt in file["excerpts"]]
    assert [line.rpartition("# ")[2] for line in shown] == ["first", "second"]


def test_every_reason_of_the_rules_has_a_remedy() -> None:
    """The sentences that the rules of legality return, as they stand in their files."""
    schedule = Path(legality.__file__).parents[2]
    files = [*(schedule / "clusters" / "legality").glob("*.py"), *(schedule / "iteration").glob("*.py")]
    sentences = [text for file in files for text in returned_texts(ast.parse(file.read_text(encoding="utf-8")))]
    assert len(sentences) > 20
    assert [text for text in sentences if remedy(text) == UNKNOWN] == []


def returned_texts(tree: ast.Module) -> Iterator[str]:
    """Yield the sentences that functions return: constants and the constant parts of f-strings, with spaces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Return):
            for part in ast.walk(node):
                text = part.value if isinstance(part, ast.Constant) else None
                if isinstance(text, str) and text.count(" ") > 2:
                    yield text


@pytest.mark.parametrize(
    ("reason", "part"),
    [
        ("aten.sort.default is an extern", NO_RULE),
        ("aten.mm.default is an extern (this target leaves matrix products to the library)", "fusion calibrate"),
        ("aten.mm.default is an extern (the library is faster here)", "max-autotune"),
        ("in_chunks is an extern (its product is larger than the workspace)", "workspace"),
        ("together it would take longer (3.1 µs against 2.0 µs)", "measure=True"),
        ("something new", UNKNOWN),
    ],
)
def test_what_it_would_take(reason: str, part: str) -> None:
    assert part in remedy(reason)
