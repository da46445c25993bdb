"""Measures time and memory of several calls, alternating, so that noise affects all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch

from fusion.codegen.tuning.timing import cpu_clock

FLUSH_BYTES = 512 << 20
"""Zeroed between timed runs on a GPU: more than its L2."""
FLUSH_SECONDS = 100e-6
"""The least time that a device takes to zero them."""

WARM_UP = 5
IN_A_ROW = 3


def seconds_in_turn(calls: Mapping[str, Callable[[], object]], device: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call in each of `rounds` rounds, by name.

    On a CPU short calls are repeated until a sample lasts about 5 ms, by `cpu_clock`; on a GPU the time is the
    device's, between events, with a cold L2 cache: the device is kept busy until the host has launched all of a call.
    """
    return _cuda_seconds(calls, rounds) if device == "cuda" else _cpu_seconds(calls, rounds)


def _cpu_seconds(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    repeats, clock = {}, cpu_clock()
    for name, call in calls.items():
        call()
        start = clock()
        call()
        repeats[name] = max(1, math.ceil(5e-3 / (clock() - start)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            for _ in range(repeats[name]):
                call()
            samples[name].append((clock() - start) / repeats[name])
    return samples


def _cuda_seconds(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    flushes: dict[str, int] = {}
    for name, call in calls.items():
        for _ in range(WARM_UP):
            torch.cuda.synchronize()
            start_of_call = time.perf_counter()
            call()
            flushes[name] = math.ceil((time.perf_counter() - start_of_call) / FLUSH_SECONDS)
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(flushes[name]):
                flush.zero_()
            start.record()
            call()
            end.record()
            marks[name].append((start, end))
        torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) / 1e3 for start, end in pairs] for name, pairs in marks.items()}


def wall_seconds_in_turn(calls: Mapping[str, Callable[[], object]], device: str, rounds: int) -> dict[str, list[float]]:
    """Return the wall-clock seconds of each call in each of `rounds` rounds, by name: of three in a row, with the final
    synchronisation.  That is the host's time if it exceeds the device's.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in [*calls] * rounds:
        _finish(device)
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            calls[name]()
        _finish(device)
        samples[name].append((time.perf_counter() - start) / IN_A_ROW)
    return samples


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that one run allocates on the GPU, in addition to earlier allocations."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
