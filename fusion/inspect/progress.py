"""Progress: which step of a long command is running, for people who wait.

On a terminal with rich installed it is one live bar; otherwise one line per step, with the time that the step took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with the name of each of `total` steps as it begins; the last one only marks the end."""
    if sys.stdout.isatty():
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        except ImportError:
            pass
        else:
            columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            with Progress(*columns) as bar:
                task = bar.add_task("", total=total - 1)
                count = -1

                def live(name: str) -> None:
                    nonlocal count
                    count += 1
                    bar.update(task, description=name, completed=count)

                yield live
            return
    yield _Lines(total - 1).begin


class _Lines:
    """Plain text: a bar and a name when a step begins, its seconds when it ends."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.count = 0
        self.started = 0.0

    def begin(self, name: str) -> None:
        now = time.perf_counter()
        if self.count:
            print(f"{now - self.started:6.1f} s", flush=True)
        self.started = now
        if self.count < self.total:
            bar = "#" * (self.count + 1) + "-" * (self.total - self.count - 1)
            print(f"[{bar}] {name:<36}", end="", flush=True)
        self.count += 1
