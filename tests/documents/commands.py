"""Commands on pages: checks that files, flags and targets in them exist, and runs those with a prompt."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from fusion import cli
from tests.documents.blocks import ROOT

SETTING = re.compile(r"[A-Z][A-Z0-9_]*=")
"""The beginning of a word that sets a variable of the environment."""

ELSEWHERE = {"cd", "cp", "git", "mkdir", "nsys", "rm", "mkdocs", "open"}
"""Other programs, whose words are not checked."""

WRITTEN = ("dump/", "edited/")
"""Folders of files that the compiler or the reader writes before a command runs one of them."""


def commands_of(text: str) -> list[tuple[str, str]]:
    """Split a shell block into commands, each with the output that is shown below it.

    Where no line has a prompt, each line is a command for the reader to try, which is not run here.
    """
    text = text.replace("\\\n", " ")
    if not has_prompts(text):
        return [(line, "") for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not parts[0].strip(), "text before the first prompt"
    return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts[1:])]


def has_prompts(text: str) -> bool:
    """Does a shell block have prompts, so that its commands run in the tests?"""
    return re.search(r"^\$ ", text, re.MULTILINE) is not None


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """Split a command into the variables that it sets and its words; `python -m fusion` becomes `fusion`."""
    words = shlex.split(command, comments=True)
    settings: dict[str, str] = {}
    while words and SETTING.match(words[0]):
        name, _, settings[name] = words.pop(0).partition("=")
    if words[:3] == ["python", "-m", "fusion"]:
        words[:3] = ["fusion"]
    if words[:3] == ["python", "-m", "pip"]:
        words[:3] = ["pip"]
    if words[:3] == ["python", "-m", "pytest"]:
        words[:3] = ["pytest"]
    if words and words[0].startswith(".venv/bin/"):
        words[0] = words[0].removeprefix(".venv/bin/")
    return settings, words


def complaint(command: str, files: set[str]) -> str:
    """Describe the file, flag, target or variable of a command that does not exist; empty if all exist.

    `files` are those that the page itself defines.
    """
    settings, words = words_of(command)
    if unknown := [name for name in settings if name.startswith("FUSION_") and name not in variables()]:
        return f"no variable {unknown[0]}"
    if not words:
        return ""
    match words:
        case ["fusion", *rest]:
            return _parsed(rest)
        case ["make", *rest]:
            rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
            return next((f"no target {name}" for name in rest if "=" not in name and name not in rules), "")
        case ["pip", "install", *rest]:
            return next((f"no extra {name}" for name in _extras(rest) if name not in extras()), "")
        case ["python", "-m", "benchmarks", kind, *_]:
            described = (ROOT / "benchmarks" / "__main__.py").read_text(encoding="utf-8")
            return "" if kind in described else f"no benchmark {kind}"
        case ["python" | "torchrun" | "pytest" | "accelerate", *rest]:
            named = [word for word in rest if re.fullmatch(r"[\w/.-]+\.py|tests[\w/.-]*", word.partition("::")[0])]
            named = [name for name in named if name not in files and not name.startswith(WRITTEN)]
            gone = [name for name in named if not (ROOT / name.partition("::")[0]).exists()]
            return f"no file {gone[0]}" if gone else _pytest_options(words)
    return "" if words[0] in ELSEWHERE else f"no program {words[0]}"


def _parsed(words: list[str]) -> str:
    """Return the error of our command line for these words; empty if it takes them."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            cli.parser().parse_args([word for word in words if word != "…"])
        except SystemExit as end:
            return said.getvalue() if end.code else ""
    return ""


def _pytest_options(words: list[str]) -> str:
    """Say which option of a pytest command neither pytest nor `tests/conftest.py` has."""
    if words[0] != "pytest":
        return ""
    own = re.findall(r'addoption\("(--[\w-]+)"', (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    known = {*own, "--ignore", "--dist", "--co", "-q", "-n", "-m", "-k", "-x"}
    return next((f"no option {word}" for word in words if word.startswith("-") and word not in known), "")


def _extras(words: list[str]) -> list[str]:
    own = [word for word in words if word.startswith(".[")]
    return [name.strip() for word in own for name in word[2:].rstrip("]").split(",")]


def extras() -> set[str]:
    """List the extras of the project."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))


def variables() -> set[str]:
    """List the variables of the environment that the sources read."""
    folders = ("fusion", "codegen", "lowering")
    sources = (path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {name for source in sources for name in re.findall(r"\"(FUSION_[A-Z_]+)\"", source)}


def runs(command: str, files: set[str]) -> bool:
    """Is a command one of Fusion's, or one that runs a file of the page?"""
    words = words_of(command)[1]
    if words[:2] == ["fusion", "demo"]:  # takes as long as all the rest, and has a test of its own
        return False
    return words[:1] == ["fusion"] or bool(files & {*words}) or any(word.startswith(WRITTEN) for word in words)


TOGETHER = """
import contextlib, functools, io, json, os, pathlib, runpy, sys
import torch.distributed as dist
begin, printed = dist.init_process_group, {}
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for path in sys.argv[1:]:
    # The store of the launch still holds the addresses of the program before.
    meeting = pathlib.Path(path).resolve().with_suffix(".store").as_uri()
    dist.init_process_group = functools.partial(begin, init_method=meeting, rank=rank, world_size=world_size)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    printed[path] = out.getvalue()
if rank == 0:
    print(json.dumps(printed))
"""
"""Runs programs one after the other in the processes of one launch, because starting these takes longest."""


def printed_by_all(commands: list[str], folder: Path) -> dict[str, str]:
    """Run commands of `torchrun` that differ only in the file in one launch, and return the output of each."""
    if not commands:
        return {}
    words = [words_of(command)[1] for command in commands]
    files, (options,) = [each[-1] for each in words], {tuple(each[:-1]) for each in words}
    (folder / "together.py").write_text(TOGETHER, encoding="utf-8")
    printed = json.loads(printed_by(shlex.join([*options, "together.py", *files]), folder))
    return {command: printed[file] for command, file in zip(commands, files, strict=True)}


def printed_by(command: str, folder: Path) -> str:
    """Run a command in `folder`, and return its output."""
    settings, words = words_of(command)
    if words[0] == "fusion" and not settings:
        before = Path.cwd()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            os.chdir(folder)
            try:
                assert cli.main(words[1:]) == 0, command
            finally:
                os.chdir(before)
        return printed.getvalue()
    match words:
        case ["fusion", *rest]:
            words = [sys.executable, "-m", "fusion", *rest]
        case ["python", *rest]:
            words = [sys.executable, *rest]
        case ["torchrun", *rest]:
            words = [sys.executable, "-m", "torch.distributed.run", *rest]
        case ["accelerate", "launch", *rest]:
            words = [sys.executable, "-m", "accelerate.commands.launch", *rest]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **settings}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
