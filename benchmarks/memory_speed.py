"""Times calls beside the memory that they cannot be faster than: reading and copying as many bytes.

Before each timed call the same bytes are read and copied, because the speed of a shared machine's memory changes by
half within seconds.  *Reading* is a maximum over plain integers, a part for each thread: no program that uses the bytes
takes less.  *Copying* is `copy_` of a tensor of so many bytes to another one, which also writes as many: a program that
only reads them may take less.  Both lie in huge pages, which are read faster than the pages of 4 KB in which PyTorch
allocates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import median

import torch

from fusion.runtime.memory import empty_large

SAMPLE = 20e-3
"""The seconds that a sample lasts at least: short calls are repeated, as the steps of a model follow each other."""


@dataclass
class BesideMemory:
    """The seconds of a call in each round, and of reading and copying right before it."""

    call: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median time of the call."""
        return median(self.call)

    @property
    def of_reading(self) -> float:
        """The median of the time of reading, relative to the call's."""
        return median(read / call for read, call in zip(self.read, self.call, strict=True))

    @property
    def of_copying(self) -> float:
        """The median of the time of copying, relative to the call's."""
        return median(copy / call for copy, call in zip(self.copy, self.call, strict=True))


def beside_memory(
    calls: Mapping[str, Callable[[], object]], size: int, threads: int, rounds: int
) -> dict[str, BesideMemory]:
    """Return the times of calls in turn, by name, and those of reading and copying `size` bytes."""
    each = size // 4 // threads
    source = empty_large((threads, each), (each, 1), torch.int32).fill_(1)
    target = empty_large((threads, each), (each, 1), torch.int32).fill_(0)
    times = {name: BesideMemory() for name in calls}
    read, copy = (lambda: source.amax(1)), (lambda: target.copy_(source))
    repeats = {call: max(1, ceil(SAMPLE / _seconds(call, 1))) for call in (read, copy, *calls.values())}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].read.append(_seconds(read, repeats[read]))
            times[name].copy.append(_seconds(copy, repeats[copy]))
            times[name].call.append(_seconds(call, repeats[call]))
    return times


def _seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
