"""Building: kernels become launchers, each distinct one once, several at a time.

Equal kernels (every layer of a transformer) are one build.  The `MOST` that were asked for last stay in the process;
what a target keeps on disk is its own affair (`cache.py`).  Compilers run in threads, beside whatever else is to be
done: they are subprocesses or release the interpreter lock, and no worker ever touches a device before it launches.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from fusion.codegen.target import Launcher, Target
from fusion.lowering.kernel import Kernel, Role

MOST = 1 << 12
"""Kernels that a builder remembers: more than any program has.  Others go on in whatever launches them."""


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel ready to run: its source text and what launches it."""

    kernel: Kernel
    source: str
    launch: Launcher


@dataclass(frozen=True, slots=True)
class _Begun:
    source: str
    built: Future[Built]


class Building:
    """Kernels that are being built.  `sources` has the source of each."""

    def __init__(self, begun: Mapping[Kernel, _Begun]) -> None:
        self._futures = {kernel: each.built for kernel, each in begun.items()}
        self.sources = {kernel: each.source for kernel, each in begun.items()}

    def wait(self) -> dict[Kernel, Built]:
        """What was built of each, once all are.

        Raises:
            BuildError: of the first kernel that could not be built.
        """
        return {kernel: future.result() for kernel, future in self._futures.items()}


class Builder:
    """Builds kernels for one target and remembers them.  Thread-safe; two callers of the same kernel share one
    build.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._lock = threading.Lock()
        self._begun: dict[Kernel, _Begun] = {}

    def build(self, kernels: Sequence[Kernel]) -> list[Built]:
        """Build `kernels` and return them in order.

        Raises:
            BuildError: of the first kernel that could not be built.
        """
        built = self.begin(kernels).wait()
        return [built[kernel] for kernel in kernels]

    def begin(self, kernels: Sequence[Kernel], sources: Mapping[Kernel, str] | None = None) -> Building:
        """Generate `kernels`, and begin to build each as soon as it is generated.

        Args:
            sources: the sources of kernels that were generated before, for the same target.
        """
        workers = ThreadPoolExecutor(max(1, min(len(kernels), os.cpu_count() or 1)), "fusion-build")
        try:
            with self._lock:
                return Building({kernel: self._begin_one(kernel, sources or {}, workers) for kernel in kernels})
        finally:
            workers.shutdown(wait=False)

    def _begin_one(self, kernel: Kernel, sources: Mapping[Kernel, str], workers: ThreadPoolExecutor) -> _Begun:
        begun = self._begun.pop(kernel, None)
        if begun is None:
            if is_idle(kernel):
                begun = _idle(kernel)
            else:
                source = sources[kernel] if kernel in sources else self.target.emit(kernel)
                begun = _Begun(source, Future())
                workers.submit(self._build_one, kernel, begun)
        self._begun[kernel] = begun  # behind all others
        while len(self._begun) > MOST:
            del self._begun[next(iter(self._begun))]
        return begun

    def _build_one(self, kernel: Kernel, begun: _Begun) -> None:
        try:
            begun.built.set_result(Built(kernel, begun.source, self.target.build(kernel, begun.source)))
        except BaseException as failure:  # handed to whoever waits; a later request tries again
            with self._lock:
                self._begun.pop(kernel, None)
            begun.built.set_exception(failure)


def is_idle(kernel: Kernel) -> bool:
    """Is the grid of everything in the launch empty?  Then nothing is stored."""
    empty = (any(axis.size == 0 for axis in part.with_role(Role.GRID)) for part in kernel.parts)
    return kernel.then is None and all(empty)


def _idle(kernel: Kernel) -> _Begun:
    def launch(*args: torch.Tensor | int) -> None:
        """Nothing."""

    built = Built(kernel, f"# {kernel.name}: an empty grid, nothing is launched\n", launch)
    done = Future[Built]()
    done.set_result(built)
    return _Begun(built.source, done)
