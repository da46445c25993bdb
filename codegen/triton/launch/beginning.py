"""Beginning: what Triton does once in a process, before its first kernel is built and launched.

Its hash of itself is what every key of its cache begins with: it reads some 400 MB in 0.3 s.  Its driver is built by a
C compiler where no cache has it, in as long again.  Neither holds the interpreter lock for long, so a thread does both
while a graph is traced and scheduled.  Builds in several threads wait for it, and do not each begin anew.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import lru_cache

from triton.runtime.cache import triton_key
from triton.runtime.driver import driver


@lru_cache(maxsize=1)
def begin() -> threading.Thread:
    """The thread that does it, started at the first call."""
    thread = threading.Thread(target=_begin, name="fusion-triton", daemon=True)
    thread.start()
    return thread


def _begin() -> None:
    triton_key()
    with suppress(Exception):  # whoever needs the driver is told; to compile for a named architecture needs none
        _ = driver.active
