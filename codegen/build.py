"""Builds kernels: turns them into launchers, each distinct one once, several at a time.

Equal kernels (every layer of a transformer) are one build.  The `MOST_CACHED` recently requested ones are cached in the
process; targets manage their files on disk themselves (`cache`).  Compilers run in threads, concurrently with other
work: they are subprocesses or release the interpreter lock, and no worker uses a device before it launches.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from fusion.codegen.target import Launcher, Target
from fusion.lowering.interpret import run_kernel
from fusion.lowering.ir.kernel import Fold, Kernel, Role, statements
from fusion.lowering.printer import format_kernel

MOST_CACHED = 1 << 12
"""The most kernels that a builder caches: more than any program has.  Evicted ones live on in their users."""


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel ready to run: its source and its launcher."""

    kernel: Kernel
    source: str
    launch: Launcher


@dataclass(frozen=True, slots=True)
class _Begun:
    source: str
    built: Future[Built]


class Building:
    """A running build.  `sources` has the source of each kernel."""

    def __init__(self, begun: Mapping[Kernel, _Begun]) -> None:
        self._futures = {kernel: each.built for kernel, each in begun.items()}
        self.sources = {kernel: each.source for kernel, each in begun.items()}

    def __str__(self) -> str:
        """Return the progress as text: "7 of 31"."""
        return f"{sum(future.done() for future in self._futures.values())} of {len(self._futures)}"

    def wait(self) -> dict[Kernel, Built]:
        """Wait for all kernels and return them.

        Raises:
            BuildError: of the first kernel that could not be built.
        """
        return {kernel: future.result() for kernel, future in self._futures.items()}


class KernelBuilder:
    """Builds kernels for one target and caches them.  Thread-safe; two callers of the same kernel share one build."""

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
        """Generate `kernels`, and start to build each as soon as it is generated: products, which take longest, first.

        Args:
            sources: sources that were generated before, for the same target.
        """
        workers = ThreadPoolExecutor(max(1, min(len(kernels), os.cpu_count() or 1)), "fusion-build")
        try:
            with self._lock:
                longest_first = sorted(dict.fromkeys(kernels), key=_multiplies, reverse=True)
                begun = {kernel: self._begin_one(kernel, sources or {}, workers) for kernel in longest_first}
            return Building({kernel: begun[kernel] for kernel in kernels})
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
        self._begun[kernel] = begun  # the most recently used
        while len(self._begun) > MOST_CACHED:
            del self._begun[next(iter(self._begun))]
        return begun

    def _build_one(self, kernel: Kernel, begun: _Begun) -> None:
        try:
            begun.built.set_result(Built(kernel, begun.source, self.target.build(kernel, begun.source)))
        except BaseException as failure:  # raised in the waiting threads; a later request tries again
            with self._lock:
                self._begun.pop(kernel, None)
            begun.built.set_exception(failure)


class Evaluating(KernelBuilder):
    """Makes the decisions of a target, but runs each kernel in the evaluator: nothing is generated or compiled."""

    def _begin_one(self, kernel: Kernel, sources: Mapping[Kernel, str], workers: ThreadPoolExecutor) -> _Begun:
        if kernel not in self._begun:
            self._begun[kernel] = _done(Built(kernel, format_kernel(kernel), evaluated(kernel)))
        return self._begun[kernel]


def evaluated(kernel: Kernel) -> Launcher:
    """Return a launcher that evaluates `kernel` on its tensors and sizes."""
    count = len(kernel.params)

    def launch(*args: torch.Tensor | int) -> None:
        tensors = [arg for arg in args[:count] if isinstance(arg, torch.Tensor)]
        run_kernel(kernel, tensors, [int(size) for size in args[count:]])

    return launch


def _multiplies(kernel: Kernel) -> bool:
    """Return whether a launch computes products of matrices."""
    folds = (fold for part in kernel.launched for fold in statements(part.body, Fold))
    return any(fold.op == "dot" for fold in folds)


def is_idle(kernel: Kernel) -> bool:
    """Return whether the grids of all kernels in the launch are empty, so that nothing is stored."""
    empty = (any(axis.size == 0 for axis in part.with_role(Role.GRID)) for part in kernel.parts)
    return kernel.then is None and all(empty)


def _idle(kernel: Kernel) -> _Begun:
    def launch(*args: torch.Tensor | int) -> None:
        """Do nothing."""

    return _done(Built(kernel, f"# {kernel.name}: an empty grid, nothing is launched\n", launch))


def _done(built: Built) -> _Begun:
    done = Future[Built]()
    done.set_result(built)
    return _Begun(built.source, done)
