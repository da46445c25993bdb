"""Every code block of every page runs, and its output is the one that the page shows.

The Python blocks of a page are one program: each sees the names of those before it, and its lines are counted on from
theirs, as in a file that holds them one after the other.  Rules, devices and targets that they register are removed
afterwards. `--refresh-documents` writes their outputs into the pages, but for blocks with `…`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.compiler._cache import CacheArtifactManager

from fusion.codegen.targets import TARGETS
from fusion.lowering import rules
from fusion.lowering.registry import RULES
from tests.documents.blocks import PAGES, ROOT, Block, agrees, blocks_of, needed_by, written_back
from tests.documents.commands import commands_of, complaint, has_prompts, printed_by, printed_by_all, runs, words_of

EAGERLY = "running eagerly"
"""The beginning of the warning of a region that falls back to eager: only a page that shows it may cause it."""

LANGUAGES = {"python", "sh", "", "text", "c", "toml", "yaml", "make"}
SHELL = {"sh", ""}


@contextlib.contextmanager
def registries_kept() -> Iterator[None]:
    """Remove the rules, targets, devices and forms that are registered inside."""
    assert rules.__all__, "importing the rules registers them"
    tables: list[dict] = [RULES, TARGETS]
    if importlib.util.find_spec("triton"):
        from fusion.codegen.triton.devices import KNOWN, device_of
        from fusion.codegen.triton.forms import single_kernel

        tables.append(KNOWN)
        order = single_kernel.SINGLE_KERNEL
    kept = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            table.clear()
            table.update(before)
        if len(tables) == 3:
            device_of.cache_clear()
            single_kernel.SINGLE_KERNEL = order


@pytest.fixture
def registries() -> Iterator[None]:
    """Remove what the blocks of a page register, and keep the cache entries of other pages from what it carries."""
    with registries_kept(), CacheArtifactManager.with_fresh_cache():
        yield


class Program:
    """The Python blocks of a page, run one after the other."""

    def __init__(self, page: str, folder: Path) -> None:
        self.page, self.folder, self.source = page, folder, ""
        name = Path(page).stem.replace("-", "_")
        self.file = folder / f"{name}.py"
        self.module = types.ModuleType(f"page_{name}")
        self.module.__file__ = str(self.file)

    def run(self, block: Block) -> str:
        """Run a block, and return its output."""
        exec(compile(block.before, f"{block.place} (before)", "exec"), vars(self.module))
        skipped = "\n" * self.source.count("\n")
        self.source += block.text
        self.file.write_text(self.source, encoding="utf-8")
        sys.modules[self.module.__name__] = self.module
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(skipped + block.text, str(self.file), "exec"), vars(self.module))
        except Exception as error:
            raise AssertionError(f"{block.place} fails: {type(error).__name__}: {error}") from error
        finally:
            del sys.modules[self.module.__name__]
        return printed.getvalue()


def shell_commands(blocks: list[Block]) -> list[str]:
    """Every command of a page that is to run."""
    shells = (block for block in blocks if block.language in SHELL and not block.is_output and block.run != "not")
    return [command for block in shells if has_prompts(block.text) for command, _ in commands_of(block.text)]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("registries")
def test_blocks_run_and_print_the_shown_output(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for package in (*needed_by(text), *(["triton"] if "triton" in text else [])):
        pytest.importorskip(package)
    if 'backend="fusion"' in text and "fusion" not in torch.compiler.list_backends():
        pytest.skip("the package is not installed, so torch.compile does not know its name")
    if "triton" in text and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton interprets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    if EAGERLY not in text:
        monkeypatch.setenv("PYTHONWARNINGS", f"error:{EAGERLY}")  # for the commands; blocks run in this process
        warnings.filterwarnings("error", message=EAGERLY)  # pytest restores the filters after the test
    blocks, program = blocks_of(page, text), Program(page, tmp_path)
    files = {block.file: block for block in blocks if block.file}
    for name, block in files.items():
        (tmp_path / name).write_text(block.text, encoding="utf-8")
    launched = [command for command in shell_commands(blocks) if words_of(command)[1][:1] == ["torchrun"]]
    ran = printed_by_all(launched, tmp_path)
    printed, shown, unused = "", {}, set(files)
    for block in blocks:
        if block.run == "not" or (block.run == "gpu" and not torch.cuda.is_available()):
            printed = None
        elif block.is_output:
            if printed is not None:
                shown[block.line] = printed
        elif block.file:
            continue
        elif block.language == "python":
            printed = program.run(block)
        elif block.language in SHELL:
            for command, below in commands_of(block.text):
                unused -= {*command.replace(":", " ").split()}
                if command not in ran and has_prompts(block.text) and runs(command, set(files)):
                    ran[command] = printed_by(command, tmp_path)
                printed = ran.get(command)
                if below.strip() and printed is not None:
                    assert agrees(below, printed), f"{block.place}: {command} prints\n{printed}"
    if request.config.getoption("--refresh-documents"):
        (ROOT / page).write_text(written_back(text, shown), encoding="utf-8")
        return
    for block in blocks:
        if block.line in shown:
            assert agrees(block.text, shown[block.line]), f"{block.place} shows other than\n{shown[block.line]}"
    assert not unused, f"{page}: no command runs {', '.join(sorted(unused))}"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_understood(page: str) -> None:
    """Each has a language that runs, or is an output; files and flags of each command exist."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = blocks_of(page, text)
    assert 2 * len(blocks) == text.count("\n```") + text.startswith("```"), f"{page}: a fence that is not understood"
    files = {block.file for block in blocks if block.file}
    for block in blocks:
        assert block.language in LANGUAGES, f"{block.place}: {block.language}"
        if block.language in SHELL and not block.is_output:
            for command, _ in commands_of(block.text):
                assert not (wrong := complaint(command, files)), f"{block.place}: {command}: {wrong}"
        elif block.language == "c":
            assert block.is_output, f"{block.place}: neither code nor output"


def test_listed_messages_are_raised_somewhere() -> None:
    """Each message in the table of the troubleshooting page is in a source, with `…` for names and numbers."""
    table = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## Messages")[2]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(messages) > 10
    said = [text for folder in ("fusion", "codegen", "lowering") for text in texts_of(ROOT / folder)]
    for message in messages:
        pattern = ".*".join(map(re.escape, message.split("…")))
        assert any(re.search(pattern, text) for text in said), message


def texts_of(folder: Path) -> Iterator[str]:
    """Read the sources of a folder, with texts of several lines as one and `…` for every placeholder."""
    for path in folder.rglob("*.py"):
        joined = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        yield re.sub(r"\{[^{}\n]*\}", "…", joined)


def test_shown_outputs_are_compared() -> None:
    assert agrees("a\n…\nd", "a\nb\nc\nd\n") and agrees("a", "a\n") and agrees("…\nb", "b")
    assert not agrees("a\nd", "a\nb\nd") and not agrees("a", "a\nb") and not agrees("a.", "ab")
    page = '```python\nprint(1)\n```\n\n```text title="Output"\n2\n```\n'
    (code, output) = blocks_of("page.md", page)
    assert (code.line, output.line, output.is_output) == (2, 6, True)
    assert written_back(page, {6: "1\n"}) == page.replace("2", "1")


@pytest.mark.parametrize(
    "command",
    [
        "fusion explian model.py:f",
        "python -m fusion explain model.py:f --shopes 8",
        "make dmeo",
        "pip install '.[deev]'",
        "python examples/sotfmax.py",
        "pytest tests/nowhere.py",
        "pytest --refresh-everything",
        "FUSION_DUMPS=x python examples/softmax.py",
        "python -m benchmarks gpuu",
        "whatever",
    ],
)
def test_commands_that_do_not_exist_are_noticed(command: str) -> None:
    assert complaint(command, set())


def test_registries_are_as_before_after_a_page() -> None:
    before = dict(TARGETS), dict(RULES)
    with registries_kept():
        TARGETS["another"] = TARGETS["c"]
        del RULES[torch.ops.aten.relu.default]
    assert before == (TARGETS, RULES)
