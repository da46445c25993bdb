"""Adjusts the Python interpreter during compilation: the thread switch interval and the garbage collector's threshold.

A thread runs for the switch interval, by default 0.005 s, while another one waits.  A thread that reads a file piece by
piece, or compiles, releases the lock at each piece, and waits as long for the next.  And the garbage collector runs
after every 700 new objects: graphs are many objects, which all live, and collections took 5 to 9% of a compilation on a
CPU.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 0.0005
OBJECTS = 50_000

_lock = threading.Lock()
_before: tuple[float, tuple[int, int, int]] = sys.getswitchinterval(), gc.get_threshold()
"""The settings before the first active request."""
_asked: list[float] = []
"""The switch interval of each active request."""


@contextmanager
def for_compiling(seconds: float = SECONDS) -> Iterator[None]:
    """Limit the thread switch interval to `seconds`, and make collections rare, until the last active request ends."""
    global _before
    with _lock:
        if not _asked:
            _before = sys.getswitchinterval(), gc.get_threshold()
        _asked.append(seconds)
        _set()
    try:
        yield
    finally:
        with _lock:
            _asked.remove(seconds)
            _set()


def _set() -> None:
    """Apply the active requests, or restore the previous settings if there are none."""
    interval, (objects, *others) = _before
    sys.setswitchinterval(min(interval, *_asked) if _asked else interval)
    gc.set_threshold(max(OBJECTS, objects) if objects and _asked else objects, *others)
