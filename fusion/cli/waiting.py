"""Shows, on a terminal, what a command is waiting for: compilations take seconds, some of them minutes.

The line is on standard error, names the graph that was compiled last, and is gone before the command prints.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fusion.inspect.log import logger

PATIENCE = 1.0
"""Seconds after which something is shown, and after which it is shown again."""
_WIDTH = 100


class _Latest(logging.Handler):
    """Keeps the first line of the last message."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage().partition("\n")[0]


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show, while the block runs, what it does and for how long; nothing where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done, latest, log = threading.Event(), _Latest(logging.INFO), logger()
    level, propagates, start = log.level, log.propagate, time.monotonic()

    def show() -> None:
        while not done.wait(PATIENCE):
            text = f"{what}, {time.monotonic() - start:.0f} s" + (f"; {latest.text}" if latest.text else "")
            print(f"\r\033[K{text[:_WIDTH]}", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, name="fusion-waiting", daemon=True)
    log.addHandler(latest)
    if not log.isEnabledFor(logging.INFO):
        log.setLevel(logging.INFO)
        log.propagate = False  # nobody asked for these messages
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        log.removeHandler(latest)
        log.setLevel(level)
        log.propagate = propagates
        if time.monotonic() - start > PATIENCE:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


__all__ = ["waiting"]
