"""Runs something in a child process that may die or hang, and says what became of it.

Children are forked from a process that has imported everything and compiled a program: starting one takes
milliseconds.  That process computes in one thread, since OpenMP's threads do not survive a fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

import fusion
from tests.faults.programs import Program, agree

LIMIT = 60.0
"""Seconds after which a child counts as hung."""

CLEAR = (fusion.FusionError, MemoryError, KeyboardInterrupt)
"""The kinds of errors that may be raised under a fault."""


_inside: list[int] = []
"""The children that this process is, or was forked in; the first one leads a process group."""


@dataclass(frozen=True)
class Outcome:
    """What became of a child.

    Attributes:
        status: "right" with generated kernels; "eager", the right result with a warning; "refused" by a clear error;
            "wrong" numbers, any other error, or eager code without a word; "crashed", "hung".
    """

    status: str
    reason: str = ""

    @property
    def bad(self) -> bool:
        return self.status in ("wrong", "crashed", "hung", "unhealed")


def attempt(program: Program, *, compiler: str = "fusion", seed: int = 0, **options: object) -> Outcome:
    """Compile a program, run it on two sets of data, and compare with eager."""
    function = program.function()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            compiled = compiled_by(compiler, function, options)
            for each in (seed, seed + 1):
                ours, theirs = program.arguments(each), program.arguments(each)
                ours, theirs = [compiled(*ours), *ours], [function(*theirs), *theirs]
                if not agree(ours, theirs):
                    return Outcome("wrong", f"other numbers than eager's: {program.body}")
        except CLEAR as error:
            return Outcome("refused", brief(error))
        except Exception as error:
            return Outcome("refused" if compiler != "fusion" else "wrong", brief(error))
    if compiler != "fusion" or fusion.report(compiled).kernels:
        return Outcome("right")
    words = [str(warning.message) for warning in said if issubclass(warning.category, fusion.FusionWarning)]
    return Outcome("eager", words[0]) if words else Outcome("wrong", "runs eagerly without a word")


def compiled_by(compiler: str, function: Callable[..., Any], options: dict[str, object]) -> Callable[..., Any]:
    """Compile a function by Fusion or TorchInductor, or leave it to eager."""
    if compiler == "fusion":
        return fusion.fuse(function, options=options)
    return torch.compile(function, backend="inductor") if compiler == "inductor" else function


def brief(error: BaseException) -> str:
    """Return the type of an error, the start of its message, and the last lines that it came through."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    place = "".join(f" at {frame.filename}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{place}"


def in_child(
    work: Callable[[], Outcome], *, kill_after: float | None = None, interrupt_after: float | None = None
) -> Outcome:
    """Return the outcome of `work` in a child.

    Args:
        kill_after: seconds after which it is killed on purpose.  Then the outcome is "killed".
        interrupt_after: seconds after which it gets a SIGINT, as by Ctrl-C.
    """
    return together([work], kill_after=kill_after, interrupt_after=interrupt_after)[0]


def together(
    works: Sequence[Callable[[], Outcome]], *, kill_after: float | None = None, interrupt_after: float | None = None
) -> list[Outcome]:
    """Return the outcomes of children that run at the same time."""
    children = [Child(work) for work in works]
    return [child.outcome(kill_after, interrupt_after) for child in children]


class Child:
    """A running child and the pipe on which its outcome arrives."""

    def __init__(self, work: Callable[[], Outcome]) -> None:
        sys.stdout.flush()
        self.begun = time.monotonic()
        self.pipe, write = os.pipe()
        self.leads = not _inside
        self.pid = os.fork()
        if self.pid == 0:
            _inside.append(os.getpid())
            os.close(self.pipe)
            _run(work, write)
        os.close(write)
        if self.leads:
            with suppress(OSError):  # it has ended
                os.setpgid(self.pid, self.pid)

    def outcome(self, kill_after: float | None, interrupt_after: float | None) -> Outcome:
        """Wait for the outcome, and see to it that the child and all that it started have ended."""
        data = b""
        try:
            if interrupt_after is not None and not self._ready(interrupt_after):
                os.kill(self.pid, signal.SIGINT)
            while self._ready(LIMIT if kill_after is None else kill_after):
                part = os.read(self.pipe, 1 << 16)
                data += part
                if not part:
                    break
            else:
                if kill_after is None:
                    return Outcome("hung", f"after {LIMIT:.0f} s")
                return Outcome("killed")
        finally:
            status = self._end()
        if data:
            return Outcome(**json.loads(data))
        return Outcome("crashed", f"wait status {status}")

    def _ready(self, seconds: float) -> bool:
        left = max(0.0, self.begun + seconds - time.monotonic())
        return bool(select.select([self.pipe], [], [], left)[0])

    def _end(self) -> int:
        os.close(self.pipe)
        with suppress(ProcessLookupError):
            (os.killpg if self.leads else os.kill)(self.pid, signal.SIGKILL)
        return os.waitpid(self.pid, 0)[1]


def _run(work: Callable[[], Outcome], pipe: int) -> None:
    """Run `work` in this process, write its outcome, and exit without running anything of the parent's."""
    try:
        if len(_inside) == 1:
            os.setpgid(0, 0)  # what it starts ends with it
        try:
            outcome = work()
        except BaseException as error:
            outcome = Outcome("wrong", brief(error))
        os.write(pipe, json.dumps(asdict(outcome)).encode())
    finally:
        os._exit(0)


__all__ = ["CLEAR", "Child", "Outcome", "attempt", "brief", "in_child", "together"]
