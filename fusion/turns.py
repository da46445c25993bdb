"""Turns: for how long one thread computes in Python while another one waits to.

Python has a thread go on for 5 ms.  One that reads a file of 400 MB piece by piece, or compiles, lets go at each piece,
and waits as long for the next: of 0.4 s of work in the threads beside a compilation, 1.3 s became.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 0.0005

_lock = threading.Lock()
_asked: list[float] = []
"""What was set before, once for each thread that compiles."""


@contextmanager
def short_turns() -> Iterator[None]:
    """Have threads take turns after half a millisecond, until the last of those who asked for it is done."""
    with _lock:
        _asked.append(sys.getswitchinterval() if not _asked else _asked[0])
        sys.setswitchinterval(min(SECONDS, _asked[0]))
    try:
        yield
    finally:
        with _lock:
            before = _asked.pop()
            if not _asked:
                sys.setswitchinterval(before)
