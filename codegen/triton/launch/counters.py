"""Counters: where the programs of a launch count themselves, so that the last one can go on (`tail`).

What enters is a device; what leaves are addresses of int32s that are 0, each given out once.  Two launches share one
only if they cannot overlap: because they are on the same stream, or because they are the same node of one CUDA graph,
which never runs twice at a time.  So a launcher takes one for each stream, and one for each launch that is captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch

Run: TypeAlias = Callable[[int, Sequence[int]], None]
"""Launches on one device: called with the number of programs, then pointers and sizes."""

_CHUNK = 1 << 14
_LOW = 1 << 10

_memory: list[torch.Tensor] = []  # stays for the life of the process
_free: dict[int, list[int]] = {}
_lock = threading.Lock()


def reserve(device: int) -> None:
    """Have enough counters on `device`, which is the current one, for captures to come; they cannot allocate."""
    with _lock:
        if len(_free.get(device, ())) < _LOW and not torch.cuda.is_current_stream_capturing():
            # By another thread: what this one allocates may go to the pool of a CUDA graph that is to be recorded.
            with ThreadPoolExecutor(max_workers=1) as other:
                zeros = other.submit(_zeros, device).result()
            _memory.append(zeros)
            first = zeros.data_ptr()
            _free.setdefault(device, []).extend(range(first, first + 4 * _CHUNK, 4))


def _zeros(device: int) -> torch.Tensor:
    with torch.cuda.device(device):
        zeros = torch.zeros(_CHUNK, dtype=torch.int32, device=torch.device("cuda", device))
        torch.cuda.current_stream(device).synchronize()  # all streams use them
    return zeros


def take(device: int) -> int | None:
    """The address of a counter on `device`; None if there is none left."""
    with _lock:
        return _free[device].pop() if _free.get(device) else None


def counted(run: Run, device: int) -> Run:
    """`run`, given a counter after its other arguments."""
    of_stream: dict[int, int] = {}
    stream_of = torch._C._cuda_getCurrentRawStream
    reserve(device)

    def run_counted(programs: int, args: Sequence[int]) -> None:
        stream = stream_of(device)
        counter = of_stream.get(stream)
        if torch.cuda.is_current_stream_capturing():
            counter = take(device)
        elif counter is None:
            reserve(device)
            counter = of_stream[stream] = take(device) or 0
            assert counter, "counters have just been reserved"
        if counter is None:  # the capture is longer than was reserved for: the graph sets this one to 0 itself
            own = torch.zeros((), dtype=torch.int32, device=torch.device("cuda", device))
            run(programs, [*args, own.data_ptr()])
        else:
            run(programs, [*args, counter])

    return run_counted
