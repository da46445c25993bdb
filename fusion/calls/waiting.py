"""Shows the current wait on a terminal: compilations take seconds, some of them minutes.

The line is on standard error: `compiling Net, 12 s; kernels of forward: 7 of 31`.  It appears once something has taken
longer than `PATIENCE`, and is gone when that ends.  Nothing is shown where standard error is no terminal, in notebooks,
where compilations are logged, and with `FUSION_PROGRESS=0`.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TextIO, TypeAlias

from fusion.options import shows_progress

PATIENCE, PERIOD = 1.5, 0.25
"""Seconds after which something is shown, and after which it is shown again."""
_WIDTH = 100

Activity: TypeAlias = "str | Callable[[], str]"
"""The current activity, or a function that returns it whenever it is shown."""


@dataclass(slots=True)
class _Wait:
    """Describes the wait of a thread."""

    what: str
    activity: Activity = ""
    start: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        activity = self.activity if isinstance(self.activity, str) else self.activity()
        return f"{self.what}, {time.monotonic() - self.start:.0f} s" + (f"; {activity}" if activity else "")


_WAITS: dict[int, _Wait] = {}
"""Thread → its wait, the longest first."""
_LOCK = threading.Lock()


class _Line:
    """Shows the longest wait, until it is ended."""

    latest: _Line | None = None

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._done = stream, threading.Event()
        self._thread = threading.Thread(target=self._show, name="fusion-waiting", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Remove the line."""
        self._done.set()
        self._thread.join()

    def _show(self) -> None:
        is_shown = False
        with suppress(OSError, ValueError):  # the stream was closed
            while not self._done.wait(PERIOD):
                with _LOCK:
                    wait = next(iter(_WAITS.values()), None)
                if wait is not None and time.monotonic() - wait.start > PATIENCE:
                    width = min(_WIDTH, shutil.get_terminal_size().columns - 1)
                    self._stream.write(f"\r\033[K{str(wait)[:width]}")
                    self._stream.flush()
                    is_shown = True
            if is_shown:
                self._stream.write("\r\033[K")
                self._stream.flush()


@contextmanager
def waiting(what: str, activity: Activity = "") -> Iterator[None]:
    """Show the activity and the duration of the block while it runs; within another such block, only the activity."""
    thread = threading.get_ident()
    if thread in _WAITS:
        doing(activity)
        yield
        return
    if not _is_shown():
        yield
        return
    with _LOCK:
        if not _WAITS:
            _Line.latest = _Line(sys.stderr)
        _WAITS[thread] = _Wait(what, activity)
    try:
        yield
    finally:
        with _LOCK:
            del _WAITS[thread]
            line = _Line.latest if not _WAITS else None
        if line is not None:
            line.end()


def doing(activity: Activity) -> None:
    """Set the current activity of this thread, for the line that shows its wait."""
    wait = _WAITS.get(threading.get_ident())
    if wait is not None and activity:
        wait.activity = activity


def _is_shown() -> bool:
    """Return whether somebody reads a line that is written and removed."""
    stream = sys.stderr
    if stream is None or not stream.isatty() or "ipykernel" in sys.modules or os.environ.get("TERM") == "dumb":
        return False
    is_logged = bool(os.environ.get("TORCH_LOGS")) or logging.getLogger("fusion").isEnabledFor(logging.INFO)
    return not is_logged and shows_progress()


__all__ = ["doing", "waiting"]
