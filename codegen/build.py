"""Building: kernels become launchers, each distinct one once, several at a time.

Equal kernels (every layer of a transformer) are one build.  What was built stays for the life of the process; what a
target keeps on disk is its own affair (`cache.py`).  Compilers run in threads: they are subprocesses or release the
interpreter lock, and no worker ever touches a device before it launches.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from codegen.target import Launcher, Target
from lowering.kernel import Kernel, Role


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel ready to run: its source text and what launches it."""

    kernel: Kernel
    source: str
    launch: Launcher


class Builder:
    """Builds kernels for one target and remembers them.  Thread-safe; two callers of the same kernel share one
    build.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._lock = threading.Lock()
        self._built: dict[Kernel, Future[Built]] = {}

    def build(self, kernels: Sequence[Kernel], sources: Mapping[Kernel, str] | None = None) -> list[Built]:
        """Build `kernels`, in parallel, and return them in order.

        Args:
            sources: the sources of kernels that were generated before, for the same target.

        Raises:
            BuildError: of the first kernel that could not be built.
        """
        mine: list[Kernel] = []
        with self._lock:
            for kernel in kernels:
                if kernel not in self._built:
                    self._built[kernel] = Future()
                    mine.append(kernel)
            futures = [self._built[kernel] for kernel in kernels]
        if len(mine) == 1:
            self._build_one(mine[0], sources or {})
        elif mine:
            with ThreadPoolExecutor(max_workers=min(len(mine), os.cpu_count() or 1)) as pool:
                list(pool.map(partial(self._build_one, sources=sources or {}), mine))
        return [future.result() for future in futures]

    def _build_one(self, kernel: Kernel, sources: Mapping[Kernel, str]) -> None:
        future = self._built[kernel]
        try:
            future.set_result(_idle(kernel) if is_idle(kernel) else self._built_now(kernel, sources.get(kernel)))
        except BaseException as failure:  # handed to whoever waits; a later request tries again
            with self._lock:
                del self._built[kernel]
            future.set_exception(failure)

    def _built_now(self, kernel: Kernel, source: str | None) -> Built:
        source = self.target.emit(kernel) if source is None else source
        return Built(kernel, source, self.target.build(kernel, source))


def is_idle(kernel: Kernel) -> bool:
    """Is the grid of everything in the launch empty?  Then nothing is stored."""
    empty = (any(axis.size == 0 for axis in part.with_role(Role.GRID)) for part in kernel.parts)
    return kernel.then is None and all(empty)


def _idle(kernel: Kernel) -> Built:
    def launch(*args: torch.Tensor | int) -> None:
        """Nothing."""

    return Built(kernel, f"# {kernel.name}: an empty grid, nothing is launched\n", launch)
