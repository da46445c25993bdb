"""Shares a run among processes: they compile side by side, and measure one at a time.

Most of a run on a GPU is compilation.  While a process measures, the others may still run a kernel once: medians are
not affected.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing.synchronize import Lock
from typing import TypeVar

import torch

from fusion.codegen.tuning.timing import median_time

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
    with alone():
        return median_time(call, device, prepare)


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
