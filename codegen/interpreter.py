"""The interpreter while something is compiled: how long threads take turns, and how often garbage is looked for.

Python has a thread go on for 5 ms while another one waits.  One that reads a file piece by piece, or compiles, lets go
at each piece, and waits as long for the next.  And it looks for garbage at every 700 objects that are more than before:
graphs are many objects, which all live, and 5 to 9% of a compilation on a CPU went by in looking.
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
"""What was set before the first of those who ask now."""
_asked: list[float] = []
"""How long turns are to be, of each who asks."""


@contextmanager
def for_compiling(seconds: float = SECONDS) -> Iterator[None]:
    """Have turns last `seconds` at most, and looks for garbage be rare, until the last of those who ask is done."""
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
    """What is asked for, or what was set before if nothing is."""
    interval, (objects, *others) = _before
    sys.setswitchinterval(min(interval, *_asked) if _asked else interval)
    gc.set_threshold(max(OBJECTS, objects) if objects and _asked else objects, *others)
