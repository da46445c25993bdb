"""Limits the time of a block, wherever in Python it is."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeUp(BaseException):
    """The limited block has used up its time."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `TimeUp` in the body after `seconds`; only in the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
