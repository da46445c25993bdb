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
_before: list[tuple[float, tuple[int, int, int]]] = []
"""What was set before, once for each that compiles."""


@contextmanager
def for_compiling() -> Iterator[None]:
    """Have turns be short and looks for garbage rare, until the last of those who asked for it is done."""
    with _lock:
        _before.append(_before[0] if _before else (sys.getswitchinterval(), gc.get_threshold()))
        interval, (objects, *others) = _before[0]
        sys.setswitchinterval(min(SECONDS, interval))
        gc.set_threshold(max(OBJECTS, objects) if objects else 0, *others)
    try:
        yield
    finally:
        with _lock:
            interval, thresholds = _before.pop()
            if not _before:
                sys.setswitchinterval(interval)
                gc.set_threshold(*thresholds)
