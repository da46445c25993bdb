"""The page of a report: well-formed, alone in its file, safe against names of the program, and usable."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import fusion
from fusion.codegen.price import along
from fusion.inspect.document.structure import Document, FindingEntry, GraphEntry, OperationEntry, SourcePlace
from fusion.inspect.page import SCRIPTS, frame_of, page_of
from fusion.inspect.page.layout import layered
from fusion.inspect.page.views import MOST_BOXES, views_of
from fusion.lowering.printer import format_bytes

PAGE = Path(fusion.__file__).parent / "inspect" / "page"
FRESH = {"graph_cache": False}
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>&lt;\u2028"
NODE = shutil.which("node")
VOID = {"meta", "img", "br", "input", "link"}


class Elements(HTMLParser):
    """Reads a page, and fails where an element is not closed, or closed by another one's end."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


def small() -> Document:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.out(self.norm(x)), -1).sort(-1).values

    return fusion.explain(Net(), options=FRESH)(torch.randn(8, 32)).json(artefacts=True)


@pytest.fixture(scope="module")
def document() -> Document:
    return small()


@pytest.fixture(scope="module")
def page(document: Document) -> str:
    return page_of(document)


def data_of(page: str) -> Any:
    """Return the data that a page holds."""
    elements = Elements(page)
    (data,) = [k for k, (tag, has) in enumerate((t, a) for t, a in elements.found if t == "script") if has.get("id")]
    return json.loads(elements.texts["script"][data])


def test_the_page_is_well_formed_and_holds_the_document(page: str, document: Document) -> None:
    held = data_of(page)["report"]
    for kernel, packed in zip(document["kernels"], held["kernels"], strict=True):
        unpacked = [json.loads(gzip.decompress(base64.b64decode(each["packed"]))) for each in packed["artefacts"]]
        assert unpacked == [{"text": each["text"], "lines": each["lines"]} for each in kernel["artefacts"]]
        packed["artefacts"] = kernel["artefacts"]
    assert held == document


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    elements = Elements(page)
    loading = {"src", "href", "srcset", "action", "data", "poster", "background"}
    assert not [(tag, attributes) for tag, attributes in elements.found if loading & attributes.keys()]
    (style,), script = elements.texts["style"], elements.texts["script"][1]
    assert "url(" not in style and "@import" not in style
    assert not re.search(r"\bfetch\(|XMLHttpRequest|WebSocket|\bimport\b|innerHTML|\beval\(", script)
    addresses = set(re.findall(r"https?://[^\s\"'`]+", style + script))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name of a kind of elements, not an address to load


def test_the_policy_of_the_page_runs_its_own_script_alone(page: str) -> None:
    elements = Elements(page)
    (policy,) = [has["content"] for tag, has in elements.found if has.get("http-equiv") == "Content-Security-Policy"]
    digests = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (elements.texts["script"][1], elements.texts["style"][0])
    ]
    assert policy == "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'".format(*digests)


def hostile(value: Any, key: str = "") -> Any:
    """Return a document in which every text is markup, but those that decide what is shown."""
    if isinstance(value, dict):
        return {name: hostile(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [hostile(each, key) for each in value]
    return value + HOSTILE if isinstance(value, str) and key not in ("kind", "stage") else value


def test_names_of_the_program_are_text(document: Document) -> None:
    attacked = cast("Document", hostile(document))
    elements = Elements(page := page_of(attacked))
    assert [tag for tag, _ in elements.found].count("script") == 2 and "img" not in [tag for tag, _ in elements.found]
    assert data_of(page)["report"]["graphs"] == attacked["graphs"]


def test_a_frame_holds_the_page_as_an_attribute(page: str) -> None:
    (frame,) = Elements(frame_of(page)).found
    assert frame[0] == "iframe" and frame[1]["srcdoc"] == page


def test_notebooks_show_the_page_without_artefacts() -> None:
    explanation = fusion.explain(lambda x: x.exp() + 1, options=FRESH)(torch.randn(8))
    (frame,) = Elements(explanation._repr_html_()).found
    assert data_of(frame[1]["srcdoc"] or "")["report"] == explanation.json()


def test_the_page_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    explanation = fusion.explain(lambda x: x.exp() + 1, options=FRESH)(torch.randn(8))
    path = explanation.html(tmp_path / "report.html")
    assert path == tmp_path / "report.html"
    (kernel,) = data_of(path.read_text(encoding="utf-8"))["report"]["kernels"]
    assert [each["stage"] for each in kernel["artefacts"]] == ["s"]
    with pytest.raises(OSError, match="missing"):
        explanation.html(tmp_path / "missing" / "report.html")


def test_a_kernel_without_artefacts_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = fusion.explain(lambda x: x.exp() + 1, options=FRESH)(torch.randn(8))
    monkeypatch.setenv("CC", "no-such-compiler")
    (kernel,) = explanation.json(artefacts=True)["kernels"]
    assert kernel["artefacts"] == [] and "no-such-compiler" in kernel["failed"]


def test_an_explanation_of_nothing_has_a_page() -> None:
    nothing = fusion.report(fusion.fuse(lambda x: x + 1))
    assert data_of(page_of(nothing.json())) == {"report": nothing.json(), "views": []}


@pytest.mark.slow
def test_the_page_of_gpt2_is_small(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
    fused = fusion.fuse(lambda ids: model(ids).logits, options=FRESH)
    fused(torch.randint(0, 500, (1, 32))).sum().backward()
    explanation = fusion.report(fused)
    assert sum(len(graph.lowered) for graph in explanation.graphs) > 1000
    path = explanation.html(tmp_path / "report.html")
    assert path.stat().st_size < 3_000_000
    if importlib.util.find_spec("PyQt6"):
        timed = "(() => {{ const start = performance.now(); {}; show(); return performance.now() - start; }})()"
        clicks = ["go('graph', 0, 'before')", "go('graph', 1, 'after')", *EVERYWHERE[:5]]
        found = opened(path, *map(timed.format, clicks), *EVERYWHERE)
        assert found["messages"] == []
        assert max(found["results"][: len(clicks)]) < 500, "each click is answered within half a second"


# Layout ---------------------------------------------------------------------------------------------------------------


def test_edges_go_down_and_boxes_stay_apart() -> None:
    widths = [40.0 + 10 * (k % 7) for k in range(60)]
    edges = [(k - step, k) for k in range(60) for step in (1, 3, 11) if k >= step and (k * step) % 4]
    layout = layered(widths, edges)
    for (start, end), points in zip(edges, layout.edges, strict=True):
        assert points[0] == layout.centres[start] and points[-1] == layout.centres[end]
        assert all(upper[1] < lower[1] for upper, lower in pairwise(points))
    rows: dict[float, list[tuple[float, float]]] = {}
    for (x, y), width in zip(layout.centres, widths, strict=True):
        rows.setdefault(y, []).append((x - width / 2, x + width / 2))
        assert x - width / 2 >= -0.1 and x + width / 2 <= layout.width + 0.1 and 0 < y < layout.height
    for row in rows.values():
        row.sort()
        assert all(left[1] < right[0] for left, right in pairwise(row))


def operation(number: int, module: str) -> OperationEntry:
    place = SourcePlace(operation=f"op_{number}", module=module, file=None, line=None, text="")
    reads = [f"op_{number - step}" for step in (1, 37) if number >= step]
    sizes = {"bytes_read": 8, "bytes_written": 4}
    return OperationEntry(
        name=f"op_{number}", kind="map", text="", place=place, reads=reads, writes=[f"op_{number}"], steps=[], **sizes
    )


def graph_of(operations: list[OperationEntry]) -> GraphEntry:
    nothing = {"read": 0, "written": 0}
    empty: dict[str, Any] = {name: [] for name in ("notes", "steps", "refusals", "tunings", "passes")}
    empty |= {"label": "inference", "failure": "", "device": None, "graph_break": None}
    return cast("GraphEntry", {**empty, "operations": operations, "traffic_before": nothing, "traffic_after": nothing})


@pytest.mark.parametrize("modules", [True, False], ids=["modules", "one function"])
def test_a_large_graph_is_collapsed_into_views_with_few_boxes(modules: bool) -> None:
    names = [f"layers.{k // 100}.part{k % 100 // 25}" if modules else "" for k in range(2000)]
    views = views_of(graph_of([operation(k, name) for k, name in enumerate(names)]))["before"]
    assert max(len(view["boxes"]) for view in views.values()) <= MOST_BOXES + 24
    shown = [box["item"] for view in views.values() for box in view["boxes"] if box["count"] == 1]
    assert sorted(cast("list[int]", shown)) == [*range(2000)]
    parts = [box["view"] for view in views.values() for box in view["boxes"] if box["view"] is not None]
    assert {*parts} == {key for key, view in views.items() if view["parent"] is not None}
    assert ("layers.3" in str(views["0"])) == modules


def test_edges_of_a_view_connect_its_boxes_in_the_direction_of_the_data() -> None:
    views = views_of(graph_of([operation(k, f"layers.{k // 50}") for k in range(400)]))["before"]
    for view in views.values():
        for line in view["lines"]:
            start, end = view["boxes"][line["start"]], view["boxes"][line["end"]]
            assert line["points"][0] == [start["x"], start["y"]] and line["points"][-1] == [end["x"], end["y"]]
            assert line["tensors"]


# Scripts --------------------------------------------------------------------------------------------------------------


def test_every_script_is_part_of_the_page(page: str) -> None:
    assert {path.stem for path in PAGE.glob("*.js")} == {*SCRIPTS}
    assert all(path.read_text(encoding="utf-8") in page for path in PAGE.glob("*.js"))


@pytest.mark.skipif(NODE is None, reason="needs node")
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse(name: str) -> None:
    subprocess.run([cast("str", NODE), "--check", str(PAGE / f"{name}.js")], check=True, capture_output=True)


def figures(expression: str, given: object) -> Any:
    """Evaluate an expression over `given` with the functions of figures.js."""
    source = (PAGE / "figures.js").read_text(encoding="utf-8")
    code = (
        f"{source}\nconst given = JSON.parse(require('fs').readFileSync(0));console.log(JSON.stringify({expression}));"
    )
    done = subprocess.run(
        [cast("str", NODE), "-e", code], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


needs_node = pytest.mark.skipif(NODE is None, reason="needs node")


@needs_node
def test_bytes_and_bandwidth_are_those_of_the_compiler() -> None:
    sizes = [0, 1, 1023, 1024, 1536, 3 << 20, 5 << 30]
    assert figures("given.map(formatBytes)", sizes) == [format_bytes(size) for size in sizes]
    curve = ((1e5, 900.0), (1e6, 400.0), (1e8, 90.0))
    touched = [1.0, 1e5, 3e5, 1e6, 5e7, 1e9]
    expected = pytest.approx([along(curve, each) for each in touched])
    assert figures("given[1].map((bytes) => bandwidthAt(given[0], bytes))", [curve, touched]) == expected


@needs_node
def test_rows_add_up_to_the_whole(document: Document) -> None:
    rows = figures("rowsOfSteps(given)", document["graphs"])
    (graph,) = document["graphs"]
    assert sum(len(row["launches"]) for row in rows) == len(graph["steps"])
    assert sum(row["read"] for row in rows) == graph["traffic_after"]["read"]
    assert sum(row["written"] for row in rows) == graph["traffic_after"]["written"]
    assert {row["kernel"] for row in rows if row["kind"] == "kernel"} == {*range(len(document["kernels"]))}


@needs_node
def test_equal_refusals_are_one_row_and_cost_as_much(document: Document) -> None:
    graphs = document["graphs"] * 3
    single, grouped = (figures(f"rowsOfRefusals(given, {flag})", graphs) for flag in ("false", "true"))
    assert len(single) == 3 * len(document["graphs"][0]["refusals"]) and len(grouped) < len(single)
    assert sum(row["count"] for row in grouped) == len(single)
    costs = [sum(row["microseconds"] for row in rows) for rows in (single, grouped)]
    assert costs[0] == pytest.approx(costs[1])


@needs_node
def test_rows_are_searched_by_words_and_sorted_with_unknown_ones_last() -> None:
    assert figures("given.map((text) => matches('sum  LAYER', text))", ["layer norm, sum_1", "sum"]) == [True, False]
    assert figures("sorted(given, (each) => each, false)", [1, None, 3, 2]) == [3, 2, 1, None]
    assert figures("sorted(given, (each) => each, true)", ["b", "a"]) == ["b", "a"]


# A browser ------------------------------------------------------------------------------------------------------------

EVERYWHERE = (
    *("go('refusals')", "go('passes')", "go('traffic')", "go('certificate')", "go('kernels')"),
    "document.getElementById('theme').click()",
    "rowsOfSteps(report.graphs).map((row) => { go('kernels', row.key, 0); return 1; }).length",
)
needs_browser = pytest.mark.skipif(importlib.util.find_spec("PyQt6") is None, reason="needs PyQt6-WebEngine")


def opened(path: Path, *scripts: str) -> dict[str, list[Any]]:
    """Open a page in a browser and run scripts in it; return their results and what the console got."""
    command = [sys.executable, str(Path(__file__).with_name("browser.py")), str(path), *scripts]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    assert len(found["results"]) == len(scripts), found
    return found


def written(page: str, folder: Path) -> Path:
    (folder / "report.html").write_text(page, encoding="utf-8")
    return folder / "report.html"


@needs_browser
@pytest.mark.slow
def test_every_tab_is_shown_without_an_error(page: str, tmp_path: Path) -> None:
    tabs = [f"go('graph', 0, '{when}'); document.querySelectorAll('.box').length" for when in ("before", "after")]
    found = opened(written(page, tmp_path), *tabs, *EVERYWHERE)
    assert found["messages"] == []


@needs_browser
@pytest.mark.slow
def test_what_a_command_found_is_the_first_tab(document: Document, tmp_path: Path) -> None:
    finding: FindingEntry = {"command": "verify", "good": False, "text": "DIFFERS: result\nnote: <b>none</b>"}
    main = "document.getElementById('main').textContent"
    tabs = "[...document.querySelectorAll('#tabs button')].map((tab) => tab.textContent)"
    found = opened(written(page_of({**document, "finding": finding}), tmp_path), tabs, main, *EVERYWHERE)
    assert found["results"][0][:2] == ["Verify", "Kernels"] and found["messages"] == []
    assert found["results"][1] == "fusion verify: exit code 1DIFFERS: result\nnote: <b>none</b>"


@needs_browser
@pytest.mark.slow
def test_two_clicks_answer_the_three_questions(page: str, tmp_path: Path) -> None:
    kernel = "[...document.querySelectorAll('tbody tr')].find((row) => row.textContent.includes('amax')).click()"
    store = "[...document.querySelectorAll('.pane:nth-child(3) .code .known')].pop().click()"
    hits = "[...document.querySelectorAll('.pane:nth-child(1) .hit')].map((line) => line.textContent).join('\\n')"
    found = opened(written(page, tmp_path), kernel, "document.querySelector('.detail').textContent", store, hits)
    _, detail, _, lines = found["results"]
    assert "Why: a reduction would run over an axis" in detail and "What it would take:" in detail
    assert "torch.softmax(" in lines and found["messages"] == []


@needs_browser
@pytest.mark.slow
def test_the_page_works_in_the_frame_of_a_notebook(page: str, tmp_path: Path) -> None:
    notebook = f"<!DOCTYPE html><title>notebook</title>{frame_of(page)}"
    shown = "frames[0].document.querySelectorAll('.box').length"
    found = opened(written(notebook, tmp_path), "frames[0].go('graph', 0, 'before'); 1", shown)
    assert found["results"][1] > 10 and found["messages"] == []


@needs_browser
@pytest.mark.slow
def test_the_ledger_is_searched_and_sorted(page: str, tmp_path: Path) -> None:
    cell = "[...document.querySelectorAll('tbody td:nth-child({})')].map((cell) => cell.textContent)"
    search = (
        "(() => { const search = document.querySelector('input[type=search]'); search.value = 'COMPARED itself';"
        " search.dispatchEvent(new Event('input')); })()"
    )
    sort = "[...document.querySelectorAll('th button')].find((head) => head.textContent === 'why').click()"
    found = opened(written(page, tmp_path), "go('refusals')", sort, cell.format(6), search, cell.format(6))
    _, _, reasons, _, hits = found["results"]
    assert len(reasons) > 3 and reasons == sorted(reasons) and found["messages"] == []
    assert hits == ["div is compared with itself at another point, and has to be the same there"]


@needs_browser
@pytest.mark.slow
def test_graphs_are_panned_and_zoomed(page: str, tmp_path: Path) -> None:
    seen = "document.querySelector('.graph svg').getAttribute('viewBox').split(' ').map(Number)"
    press = "document.querySelector('.graph svg').dispatchEvent(new KeyboardEvent('keydown', {{key: '{}'}})); {}"
    scripts = [press.format(key, seen) for key in ("ArrowRight", "+", "0")]
    found = opened(written(page, tmp_path), "go('graph', 0, 'before')", seen, *scripts)
    _, start, moved, zoomed, whole = found["results"]
    assert moved[0] == pytest.approx(start[0] + start[2] / 10) and zoomed[2] < moved[2]
    assert whole[:2] == [-30, -30] and found["messages"] == []


@needs_browser
@pytest.mark.slow
def test_markup_in_names_is_not_run(document: Document, tmp_path: Path) -> None:
    page = page_of(cast("Document", hostile(document)))
    found = opened(written(page, tmp_path), "go('graph', 0, 'after')", *EVERYWHERE, "typeof window.hacked")
    assert found["results"][-1] == "undefined" and found["messages"] == []


@needs_browser
@pytest.mark.slow
def test_a_program_of_two_thousand_operations_stays_usable(document: Document, tmp_path: Path) -> None:
    """Each click is answered within half a second."""
    graph = graph_of([operation(k, f"layers.{k // 100}") for k in range(2000)])
    graph["refusals"] = [
        {**each, "producer": f"t_{k}"} for k in range(4000) for each in document["graphs"][0]["refusals"][:1]
    ]
    graph["steps"] = document["graphs"][0]["steps"]
    page = page_of(
        {**document, "graphs": [{**graph, "operations": document["graphs"][0]["operations"] + graph["operations"]}]}
    )
    timed = "(() => {{ const start = performance.now(); {}; show(); return performance.now() - start; }})()"
    clicks = (
        "go('graph', 0, 'before')",
        "ledger.grouped = false; go('refusals')",
        "go('kernels')",
        "go('graph', 0, 'before', '', 1500)",
    )
    found = opened(written(page, tmp_path), *(timed.format(click) for click in clicks))
    assert max(found["results"]) < 500 and found["messages"] == []


def walk(value: object) -> Iterator[str]:
    """Yield all texts of a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from walk(each)


def test_hostile_documents_are_hostile(document: Document) -> None:
    assert sum(HOSTILE in text for text in walk(hostile(document))) > 100
