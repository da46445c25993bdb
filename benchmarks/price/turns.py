"""Shares a run among processes: they compile side by side, and measure one at a time.

Most of a run on a GPU is compilation.  While a process measures, the others may still run a program once, to check it,
and take the GPU meanwhile; so each time is the least of some medians, with a pause between them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing.synchronize import Lock
from typing import TypeVar

import torch

from fusion.codegen.tuning.timing import median_time

TIMES, PAUSE = 3, 20e-3
"""How often a time is measured by processes that share a device, and the seconds between two measurements."""

Result = TypeVar("Result")

_lock: Lock | nullcontext[bool] = nullcontext(enter_result=True)
"""Held by the process that measures."""


@contextmanager
def alone() -> Iterator[None]:
    """Let no other process of this run measure while the body runs."""
    with _lock:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def median_time_alone(
    call: Callable[[], object], device: torch.device, prepare: Callable[[], object] | None = None
) -> float:
    """Return the median microseconds of a call, as `median_time` does, while no other process measures."""
    return min([median_time(call, device, prepare) for _ in repeated()])


def repeated() -> Iterator[None]:
    """Yield once for each time that a measurement is to be made: once, or several times if processes share the device.

    No other process measures meanwhile.
    """
    for count in range(1 if isinstance(_lock, nullcontext) else TIMES):
        time.sleep(PAUSE if count else 0.0)
        with alone():
            yield


def in_processes(jobs: int, work: Callable[[str], Result], names: Sequence[str]) -> Iterator[tuple[str, Result]]:
    """Yield each name with the result of `work`, in the order of the names, from `jobs` processes.

    Raises:
        BrokenProcessPool: a process crashed.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _share, (context.Lock(),)) as pool:
        begun: list[Future[Result]] = [pool.submit(work, name) for name in names]
        for name, future in zip(names, begun, strict=True):
            yield name, future.result()


def _share(lock: Lock) -> None:
    """Take the lock of the run, in a process of its own."""
    global _lock
    _lock = lock
