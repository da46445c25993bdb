"""Names in the documents exist: files and folders, options of calls, environment variables.

That their code blocks run is tested in `tests/documents/`.
"""

from __future__ import annotations

import ast
import doctest
import re
from dataclasses import fields
from pathlib import Path

import pytest

from fusion.lowering import rules
from fusion.lowering.registry import RULES
from fusion.options import Options

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)
FOLDERS = ("lowering", "codegen", "fusion", "tests", "benchmarks", "examples", "docs")
ELSEWHERE = {"tour.py", "00_graph.py", "01_inline_regions.py", "90_module.py"}
"""Files that a reader is asked to write, or that the compiler writes."""


def named(document: str) -> set[str]:
    """The files and folders that a document names in backticks or links to."""
    text = (ROOT / document).read_text(encoding="utf-8")
    result = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|md)|(?:\w+/)+)`", text))
    return result - ELSEWHERE


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    paths = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    wanted = {name: name.rstrip("/") for name in named(document)}
    missing = [name for name, end in wanted.items() if not any(f"/{path}".endswith(f"/{end}") for path in paths)]
    missing = [name for name in missing if not (ROOT / name).exists()]
    assert not missing, f"{document} names missing files: {', '.join(sorted(missing))}"


@pytest.mark.parametrize("package", ["lowering", "codegen", "fusion"])
def test_files_that_sources_name_exist(package: str) -> None:
    sources = sorted((ROOT / package).rglob("*.py"))
    known = {f"/{path.relative_to(ROOT).as_posix()}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    named = (
        (path, name) for path in sources for name in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8"))
    )
    missing = [
        f"{path.relative_to(ROOT)}: {name}" for path, name in named if not any(k.endswith(f"/{name}") for k in known)
    ]
    assert not missing, f"named, but not there: {', '.join(missing)}"


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document: its headings in lower case, without punctuation, with hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", text):
        path = (ROOT / document).parent / target if target else ROOT / document
        assert path.exists(), f"{document} links to {target}"
        assert not anchor or anchor in anchors(path), f"{document} links to {target}#{anchor}"


def test_the_table_of_options_is_complete() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `options\[\"(\w+)\"\]`", text, re.MULTILINE))
    assert listed == {field.name for field in fields(Options)} - {"mode"}


def test_the_table_of_the_environment_is_complete() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fusion").rglob("*.py"))
    sources += "".join(path.read_text(encoding="utf-8") for path in (ROOT / "codegen").rglob("*.py"))
    read = set(re.findall(r"(?:environ(?:\.get\(|\[)|_switch\()\"(FUSION_\w+)\"", sources))
    assert read >= {"FUSION_DUMP", "FUSION_STRICT", "FUSION_CACHE_DIR"}
    assert read <= set(re.findall(r"`(FUSION_\w+)", text))


def test_the_counts_of_operations_are_up_to_date() -> None:
    assert rules.__all__, "importing the rules registers them"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (counts,) = re.findall(r"About (\d+) ATen operations \((\d+) overloads\)", text)
    result = len({overload.overloadpacket for overload in RULES}), len(RULES)
    for said, here in zip(map(int, counts), result, strict=True):
        assert abs(said - here) <= 0.03 * here, f"README says {said}, there are {here}"
    ((operators, native),) = re.findall(r"`python -m benchmarks opinfo`, (\d+) operators.*?; (\d+)% run without", text)
    table = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    assert re.search(rf"counted[^|]*\| {operators} \|", table) and f"({native}%)" in table


def measured_constants() -> set[tuple[str, str]]:
    """Return (file, name) of each entry of the section "Constants": of a constant, or of a module by its own name."""
    section = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").partition("\n## Constants\n")[2]
    result: set[tuple[str, str]] = set()
    for entry in re.findall(r"^- `([\w.]+)`", section.partition("\n## ")[0], re.MULTILINE):
        path, _, name = entry.replace(".", "/").rpartition("/")
        is_module = any((ROOT / entry.replace(".", "/")).with_suffix(suffix).exists() for suffix in (".py", ""))
        result.add((f"{path}/{name}.py" if is_module else f"{path}.py", name))
    return result


def test_measured_constants_exist() -> None:
    assert len(measured_constants()) > 20
    for file, name in measured_constants():
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assigned = {
            target.id
            for node in tree.body
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            for each in (node.targets if isinstance(node, ast.Assign) else [node.target])
            for target in (each.elts if isinstance(each, ast.Tuple) else [each])
            if isinstance(target, ast.Name)
        }
        assert name in {*assigned, Path(file).stem}, f"docs/performance.md names {name} of {file}"


def test_measurements_that_sources_name_have_an_entry() -> None:
    """And each entry is named by its source."""
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for package in ("lowering", "codegen", "fusion")
        for path in (ROOT / package).rglob("*.py")
        if path == path.resolve()
        for name in re.findall(r"measured:\s+docs/performance\.md,\s+`(\w+)`", path.read_text(encoding="utf-8"))
    }
    assert named == measured_constants()


def without_examples(docstring: str) -> str:
    return "".join(part for part in doctest.DocTestParser().parse(docstring) if isinstance(part, str))


def test_docstrings_leave_times_to_the_documents() -> None:
    """A docstring states the effect, and refers to the section "Constants"; only the output of an example has times."""
    time = re.compile(r"\d ?(?:µs|ms)\b")
    texts = {
        path: path.read_text(encoding="utf-8")
        for package in ("lowering", "codegen", "fusion")
        for path in (ROOT / package).rglob("*.py")
        if path == path.resolve()
    }
    assert len(texts) > 500
    docstrings = [
        (path, node)
        for path, text in texts.items()
        if time.search(text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    assert docstrings
    timed = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, node in docstrings
        if time.search(without_examples(ast.literal_eval(node.value)))
    ]
    assert not timed, f"move times to docs/performance.md, section Constants: {', '.join(timed)}"
