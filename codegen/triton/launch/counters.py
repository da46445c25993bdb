"""Allocates the counters by which the last program of a launch knows that it is the last (`last_block`).

Input: a device; output: addresses of int32s that are 0, as many in a row as a launch has counts, each allocated once.
Two launches share a row only if they cannot overlap: because they are on the same stream, or because they are the same
node of one CUDA graph, which never runs twice at a time.  So a launcher takes a row for each stream, and one for each
launch that is captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch

Run: TypeAlias = Callable[[int, Sequence[int]], None]
"""Launches on one device: called with the number of programs, then pointers and sizes."""

_CHUNK = 1 << 16
_LOW = 1 << 14

_memory: list[torch.Tensor] = []  # kept for the life of the process
_free: dict[int, range] = {}  # device → addresses
_lock = threading.Lock()


def reserve(device: int, count: int = 1) -> None:
    """Reserve counters on `device`, the current one, for captures to come, which cannot allocate.

    New ones are allocated if few are left, or fewer than `count`.
    """
    with _lock:
        if len(_free.get(device, ())) < max(_LOW, count) and not torch.cuda.is_current_stream_capturing():
            # By another thread: allocations of this one may go to the pool of a CUDA graph that is to be captured.
            with ThreadPoolExecutor(max_workers=1) as other:
                zeros = other.submit(_zeros, device, max(_CHUNK, 2 * count)).result()
            _memory.append(zeros)
            first = zeros.data_ptr()
            _free[device] = range(first, first + 4 * len(zeros), 4)


def _zeros(device: int, count: int) -> torch.Tensor:
    with torch.cuda.device(device):
        zeros = torch.zeros(count, dtype=torch.int32, device=torch.device("cuda", device))
        torch.cuda.current_stream(device).synchronize()  # all streams use them
    return zeros


def take(device: int, count: int = 1) -> int | None:
    """Return the address of `count` counters in a row on `device`; None if fewer are left."""
    with _lock:
        left = _free.get(device, range(0))
        if len(left) < count:
            return None
        _free[device] = left[count:]
        return left[0]


def counted(run: Run, device: int, count: int = 1) -> tuple[Run, dict[int, int]]:
    """Return `run` with the address of `count` counters as its last argument, and these addresses by stream.

    Launches that are captured may not use the counters of a stream.
    """
    of_stream: dict[int, int] = {}
    stream_of = torch._C._cuda_getCurrentRawStream
    reserve(device, count)

    def run_counted(programs: int, args: Sequence[int]) -> None:
        stream = stream_of(device)
        counter = of_stream.get(stream)
        if torch.cuda.is_current_stream_capturing():
            counter = take(device, count)
        elif counter is None:
            reserve(device, count)
            counter = of_stream[stream] = take(device, count) or 0
            assert counter, "counters have just been reserved"
        if counter is None:  # the capture needs more than was reserved: the graph sets these to 0 itself
            own = torch.zeros(count, dtype=torch.int32, device=torch.device("cuda", device))
            run(programs, [*args, own.data_ptr()])
        else:
            run(programs, [*args, counter])

    return run_counted, of_stream
