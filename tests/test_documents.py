"""What the documents name exists: files and folders, the options of a call, variables of the environment."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fusion.options import Options

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
FOLDERS = ("lowering", "codegen", "fusion", "tests", "benchmarks", "examples", "docs")
ELSEWHERE = {"tour.py", "00_graph.py", "90_module.py"}
"""Files that a reader is asked to write, or that the compiler writes."""


def named(document: str) -> set[str]:
    """The files and folders that a document names in backticks or links to."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|md)|(?:\w+/)+)`", text))
    return found - ELSEWHERE


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    paths = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    wanted = {name: name.rstrip("/") for name in named(document)}
    missing = [name for name, end in wanted.items() if not any(f"/{path}".endswith(f"/{end}") for path in paths)]
    missing = [name for name in missing if not (ROOT / name).exists()]
    assert not missing, f"{document} names what is not there: {', '.join(sorted(missing))}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert ((ROOT / document).parent / target).exists(), f"{document} links to {target}"


def test_the_table_of_options_is_complete() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `options\[\"(\w+)\"\]`", text, re.MULTILINE))
    assert listed == {field.name for field in fields(Options)} - {"mode"}


def test_the_table_of_the_environment_is_complete() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fusion").rglob("*.py"))
    sources += "".join(path.read_text(encoding="utf-8") for path in (ROOT / "codegen").rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\[)\"(FUSION_\w+)\"", sources))
    assert read and read <= set(re.findall(r"`(FUSION_\w+)", text))
