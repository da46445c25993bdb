"""Times calls on a device.

Input: functions; output: the median of each, in microseconds.  On a GPU the caches are flushed before each call, and
calls alternate, so that a change of the clock rate affects all of them equally.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

_ROUNDS, _FIRST = 15, 3
_CLOSE = 1.3
"""Calls that took longer than this times the fastest in the first rounds are not measured again."""
_LONG = 1e5
"""Microseconds above which the first rounds are enough."""
_LEAST, _MOST, _ENOUGH = 5, 25, 5e4
"""Runs of a call by itself on a CPU: at least, at most, and the microseconds after which no more are started."""
_FLUSH = 1 << 29
"""Bytes that are written between two calls: several times the caches of any device; long enough to hide a launch."""


def medians(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the median time of each of `calls`, which have run before."""
    measure = _on_gpu if device.type == "cuda" else _on_cpu
    times = measure(calls, _FIRST, device)
    if min(times) > _LONG:
        return times
    close = [k for k, took in enumerate(times) if took <= _CLOSE * min(times)]
    for k, took in zip(close, measure([calls[k] for k in close], _ROUNDS, device), strict=True):
        times[k] = took
    return times


def median_time(call: Callable[[], object], device: torch.device, prepare: Callable[[], object] | None = None) -> float:
    """Return the median time of one call, which has run before, in microseconds; `prepare` runs before each, untimed.

    On a CPU it is the time of `cpu_clock` with the caches as the call before leaves them.
    """
    if device.type == "cuda":
        return _on_gpu([call], _ROUNDS, device, prepare)[0]
    took: list[float] = []
    while len(took) < _LEAST or (len(took) < _MOST and sum(took) < _ENOUGH):
        took += _on_cpu([call], 1, device, prepare)
    return median(took)


def cpu_clock() -> Callable[[], float]:
    """Return the clock, in seconds, by which calls on a CPU are timed.

    On one thread it is the clock of the thread's processor time, to which other processes of the machine add nothing;
    several threads wait for each other, so they are timed by the wall clock.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _on_gpu(
    calls: Sequence[Callable[[], object]],
    rounds: int,
    device: torch.device,
    prepare: Callable[[], object] | None = None,
) -> list[float]:
    flush = torch.empty(_FLUSH, dtype=torch.int8, device=device)
    with torch.cuda.device(device):
        marks = []
        for _ in range(rounds):
            for call in calls:
                if prepare is not None:
                    prepare()
                flush.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # not annotated in PyTorch
                start.record()
                call()
                end.record()
                marks.append((start, end))
        torch.cuda.synchronize()
    took = [start.elapsed_time(end) * 1e3 for start, end in marks]
    return [median(took[k :: len(calls)]) for k in range(len(calls))]


def _on_cpu(
    calls: Sequence[Callable[[], object]],
    rounds: int,
    device: torch.device,
    prepare: Callable[[], object] | None = None,
) -> list[float]:
    took: list[list[float]] = [[] for _ in calls]
    clock = cpu_clock()
    for _ in range(rounds):
        for call, times in zip(calls, took, strict=True):
            if prepare is not None:
                prepare()
            start = clock()
            call()
            times.append((clock() - start) * 1e6)
    return [median(times) for times in took]
