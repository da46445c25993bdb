"""The line that says on a terminal what is waited for."""

from __future__ import annotations

import logging
import os
import pty
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fusion
from fusion.calls import waiting
from fusion.calls.waiting import Activity, doing
from fusion.cli import main
from fusion.codegen.c.target import CTarget
from fusion.compilation import region
from fusion.lowering.ir.kernel import Kernel

FRESH = {"graph_cache": False}


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Make standard error a terminal within; yield a function that returns what it has got since."""
    monkeypatch.setattr(waiting, "PATIENCE", 0.0)
    monkeypatch.setattr(waiting, "PERIOD", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "90")
    for name in ("TORCH_LOGS", "FUSION_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    ours, theirs = pty.openpty()
    got: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        with suppress(OSError):  # the other end was closed
            while part := os.read(ours, 1 << 16):
                got.put(part.decode())

    def shown() -> str:
        os.write(theirs, b"\0")  # comes after all that has been written
        text = ""
        while not text.endswith("\0"):
            text += got.get(timeout=60)
        return text[:-1]

    reader = threading.Thread(target=read)  # a terminal that is not read blocks its writers after 4 KiB
    reader.start()
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as within:
        within.setattr(sys, "stderr", stream)
        yield shown
    reader.join()
    os.close(ours)


def slow_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each build of a kernel take some time."""
    build = CTarget.build

    def built(self: CTarget, kernel: Kernel, source: str) -> object:
        time.sleep(0.15)
        return build(self, kernel, source)

    monkeypatch.setattr(CTarget, "build", built)


def slow_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the capture, which ends where tracing begins, take some time."""

    def begun(activity: Activity) -> None:
        time.sleep(0.15)
        doing(activity)

    monkeypatch.setattr(region, "doing", begun)


def compiled(width: int) -> torch.Tensor:
    """Compile a program with two kernels that no other test builds."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.sort(torch.relu(x) + width).values * 2

    return fusion.fuse(program, options=FRESH)(torch.randn(3, width))


def test_a_compilation_says_what_it_does_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_capture(monkeypatch)
    slow_builds(monkeypatch)
    with terminal(monkeypatch) as shown_so_far:
        compiled(1013)
        text = shown_so_far()
    lines = re.findall(r"\r\x1b\[K([^\r]*)", text)
    assert all(re.fullmatch(r"(compiling \S*compiled\.<locals>\.program, \d+ s; .*|)", line) for line in lines), lines
    shown = [line.partition("; ")[2] for line in lines]
    assert {"capturing", "kernels of inference: 0 of 2"} <= {*shown}
    assert lines[-1] == "" and all(lines[:-1])


def test_a_short_compilation_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        monkeypatch.setattr(waiting, "PATIENCE", 100.0)
        compiled(1014)
        assert shown() == ""


def switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_PROGRESS", "0")


def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))


def logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("fusion"), "isEnabledFor", lambda level: level >= logging.INFO)


def logged_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "dynamo")


def dumb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")


def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)


@pytest.mark.parametrize("off", [switched_off, notebook, logged, logged_by_pytorch, dumb, no_terminal])
def test_nothing_is_shown_where_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch, off: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with terminal(monkeypatch) as shown:
        off(monkeypatch)
        with waiting.waiting("compiling"):
            time.sleep(0.1)
        assert shown() == ""


def test_the_longest_wait_is_shown_and_only_the_innermost_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    def other() -> None:
        with waiting.waiting("another"):
            time.sleep(0.3)

    with terminal(monkeypatch) as shown:
        with waiting.waiting("one"):
            thread = threading.Thread(target=other)
            thread.start()
            with waiting.waiting("nested", "first"):
                time.sleep(0.1)
            doing(lambda: "x" * 200)
            time.sleep(0.1)
        thread.join()
        lines = re.findall(r"\r\x1b\[K([^\r]*)", shown())
    assert lines[0] == "one, 0 s; first" and lines[-2] == "another, 0 s" and "nested" not in str(lines)
    assert max(map(len, lines)) == 89


def test_commands_say_what_they_wait_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow_builds(monkeypatch)
    path = tmp_path / "own_program.py"
    path.write_text("import torch\n\ndef scaled(x, y):\n    return torch.relu(x) * y + 3.5\n")
    words = [f"{path}:scaled", "--shape", "8,1015", "--shape", "1015", "--option", "graph_cache=no"]
    with terminal(monkeypatch) as shown:
        assert main(["kernels", *words]) == 0
        text = shown()
    assert re.search(r"compiling, \d s; kernels of inference: 0 of 1", text) and text.endswith("\r\x1b[K")
