"""Runs Triton's one-time work in a process before its first kernel is built and launched.

Its hash of itself is the start of every key of its cache: it reads some 400 MB in 0.3 s.  Its driver is built by a C
compiler if it is not cached, in as long again; so is the launcher (`direct`).  None of these holds the interpreter lock
for long, so threads run them while a graph is traced and scheduled.  Builds wait for the hash, and launches for the
driver, rather than repeat the work.
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
"""Seconds after which the hashing thread may take the interpreter lock again."""


@dataclass(frozen=True, slots=True)
class Preparations:
    """The threads that run the preparations."""

    hashing: threading.Thread
    driving: threading.Thread


@lru_cache(maxsize=1)
def start() -> Preparations:
    """Start both threads, at the first call."""
    return Preparations(_started(_hash, "hash"), _started(_drive, "driver"))


def _started(step: Callable[[], object], name: str) -> threading.Thread:
    thread = threading.Thread(target=step, name=f"fusion-triton-{name}", daemon=True)
    thread.start()
    return thread


def _hash() -> None:
    """Hash Triton; it releases the interpreter lock for each piece of a file: of 0.87 s it waited 0.6 for the lock."""
    with for_compiling(TURN):
        triton_key()


def _drive() -> None:
    with suppress(
        Exception
    ):  # a later use of the driver raises the error; compiling for a named architecture needs no driver
        _ = driver.active
        stub()
