"""Beginning: what Triton does once in a process, before its first kernel is built and launched.

Its hash of itself is what every key of its cache begins with: it reads some 400 MB in 0.3 s.  Its driver is built by a
C compiler where no cache has it, in as long again; so is what launches (`direct`).  None of these holds the interpreter
lock for long, so threads do them while a graph is traced and scheduled.  Builds wait for the hash, and launches for the
driver, rather than do it anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from fusion.codegen.interpreter import for_compiling
from fusion.codegen.triton.launch.direct import stub

TURN = 5e-5
"""Seconds after which the hash takes its next turn."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The threads that do it."""

    hashing: threading.Thread
    driving: threading.Thread


@lru_cache(maxsize=1)
def begin() -> Begun:
    """Have both begin, at the first call."""
    return Begun(_started(_hash, "hash"), _started(_drive, "driver"))


def _started(step: Callable[[], object], name: str) -> threading.Thread:
    thread = threading.Thread(target=step, name=f"fusion-triton-{name}", daemon=True)
    thread.start()
    return thread


def _hash() -> None:
    """It lets go of the interpreter for each piece of a file, some 800 times: of 0.87 s it waited 0.6 for its turns."""
    with for_compiling(TURN):
        triton_key()


def _drive() -> None:
    with suppress(Exception):  # whoever needs the driver is told; to compile for a named architecture needs none
        _ = driver.active
        stub()
