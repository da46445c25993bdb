"""Keeps the memory of large tensors on a CPU that no program sees for the next ones.

The C library maps memory for each large tensor anew, and returns it when the tensor is freed; the system zeroes every
page when it is first written to.  Here the memory of a freed tensor is kept for the next one of about its size.
Meanwhile the system may take back its pages if it lacks memory (`MADV_FREE`).  Blocks that are kept and those in use
never have more bytes than were in use at once before.

Such a tensor cannot be resized, so results that a program gets have memory of their own (`memory.empty_large`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from contextlib import suppress
from functools import cache
from threading import Lock
from typing import Any

import torch

HUGE_PAGE = 2 << 20
SPARE = 8
"""The inverse of the share of a block that a tensor may leave unused."""


class MappedBlock:
    """Memory in huge pages of at least `size` bytes.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // HUGE_PAGE) * HUGE_PAGE
        self._map = mmap.mmap(-1, self.size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._offset = -begin % HUGE_PAGE
        self.address = begin + self._offset
        self._advise(mmap.MADV_HUGEPAGE)

    def spare(self) -> None:
        """Let the system take back the pages if it lacks memory; their content may be lost."""
        self._advise(mmap.MADV_FREE)

    def _advise(self, advice: int) -> None:
        with suppress(OSError):  # a system that refuses leaves the pages as they are
            self._map.madvise(advice, self._offset, self.size)


class Recycler:
    """Blocks of memory in use, and freed ones that wait for the next tensor.

    >>> recycler = Recycler()
    >>> first = recycler.owner(1 << 20)
    >>> address = first.block.address
    >>> del first
    >>> recycler.owner(1 << 20).block.address == address
    True
    """

    def __init__(self) -> None:
        self.unlock()
        self._returned: deque[MappedBlock] = deque()  # by any thread, at any moment
        self._kept: list[MappedBlock] = []  # the ones that were freed last come last
        self._used = self._most = 0  # bytes in use now, and at most until now

    def unlock(self) -> None:
        """Forget who allocates at the moment: in a forked process that thread does not exist."""
        self._lock = Lock()

    @property
    def held(self) -> int:
        """Return the bytes of all blocks, in use or kept."""
        with self._lock:
            self._collect()
            return self._used + self._bytes_kept()

    @property
    def most(self) -> int:
        """Return the most bytes that were in use at once."""
        return self._most

    def owner(self, size: int) -> Any:
        """Return an array of bytes, of memory that is kept again once nothing refers to the array.

        Raises:
            OSError: the system has no such memory.
        """
        with self._lock:
            self._collect()
            block = self._fitting(size)
            wanted = block.size if block is not None else -(-size // HUGE_PAGE) * HUGE_PAGE
            self._most = max(self._most, self._used + wanted)
            while self._kept and self._used + wanted + self._bytes_kept() > self._most:
                self._kept.pop(0)
            block = block or MappedBlock(size)
            self._used += block.size
        owner = _owning(block.size).from_address(block.address)
        owner.block, owner.returned = block, self._returned
        return owner

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._used -= block.size
            self._kept.append(block)

    def _fitting(self, size: int) -> MappedBlock | None:
        """Take the smallest kept block of about the size, of several the one freed last; None if there is none."""
        fitting = [block for block in self._kept if size <= block.size <= size + HUGE_PAGE + size // SPARE]
        if not fitting:
            return None
        block = min(reversed(fitting), key=lambda block: block.size)
        self._kept.remove(block)
        return block

    def _bytes_kept(self) -> int:
        return sum(block.size for block in self._kept)


class _Returning:
    """Gives its block back at its end, in whichever thread that comes, and without a lock."""

    block: MappedBlock
    returned: deque[MappedBlock]

    def __del__(self) -> None:
        self.block.spare()
        self.returned.append(self.block)


@cache
def _owning(size: int) -> Any:
    """Return the type of arrays of that many bytes that give their block back."""
    return type("Owner", (_Returning, ctypes.c_char * size), {})


_SUPPORTED = all(hasattr(mmap, name) for name in ("MADV_FREE", "MADV_HUGEPAGE", "MAP_ANONYMOUS"))
RECYCLER: Recycler | None = Recycler() if _SUPPORTED else None
"""The blocks of this process; None where the system cannot be asked for huge pages, or to take pages back."""
if RECYCLER is not None:
    os.register_at_fork(after_in_child=RECYCLER.unlock)


def recycled(count: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a vector of `count` numbers on the CPU in recycled memory; None if there is no such memory."""
    if RECYCLER is None or count == 0:
        return None
    try:
        return torch.frombuffer(RECYCLER.owner(count * dtype.itemsize), dtype=dtype, count=count)
    except OSError:
        return None
