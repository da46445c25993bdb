"""Shows which step of a long command is running.

On a terminal with rich installed it is one live bar; otherwise one line per step, with the step's time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with the name of each of `total` steps as it begins; the last ends with the context."""
    if sys.stdout.isatty():
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            pass
        else:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            with Progress(*columns) as live:
                task = live.add_task("", total=total, completed=-1)
                yield lambda name: live.update(task, description=name, advance=1)
                live.update(task, description="", advance=1)
            return
    lines = _Lines(total)
    try:
        yield lines.begin
    finally:
        lines.end()


class _Lines:
    """Plain-text progress: a bar and a name when a step begins, its seconds when it ends."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.count = 0
        self.started = 0.0

    def begin(self, name: str) -> None:
        self.end()
        self.count += 1
        bar = "#" * self.count + "-" * (self.total - self.count)
        print(f"[{bar}] {name:<36}", end="", flush=True)
        self.started = time.perf_counter()

    def end(self) -> None:
        if self.count:
            print(f"{time.perf_counter() - self.started:6.1f} s", flush=True)
