"""Autotunes kernels: finds the fastest configuration by measurement (`mode="max-autotune"`).

Input: kernels and a device; output: launchers of the fastest configurations, and a `Tuning` for each kernel with its
trials.  The target lists the configurations worth trying (`alternatives`), the default first. Each is built and run
once on random numbers; a configuration that cannot be built, fails, or whose results differ from the evaluator's is
refused with the reason.  The others are timed.  The winner is stored in the cache directory (`record`).

A kernel with unknown sizes, or with others in its launch, keeps its default configuration.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from fusion.codegen.build import Built, KernelBuilder
from fusion.codegen.target import Capabilities, KernelCandidate
from fusion.codegen.tuning import record
from fusion.codegen.tuning.check import wrong
from fusion.codegen.tuning.inputs import clone, expected
from fusion.codegen.tuning.record import Trial, Tuning
from fusion.codegen.tuning.timing import medians
from fusion.lowering.errors import FusionError, brief
from fusion.lowering.ir.expr import free_axes
from fusion.lowering.ir.kernel import Fold, Kernel, loaded, statements

MOST_TRIED = 10
"""The most configurations of a kernel that are tried."""


class Tuner:
    """Tunes kernels for one target on one device, and caches them.  Thread-safe."""

    def __init__(self, builder: KernelBuilder, device: torch.device) -> None:
        self._builder, self.device = builder, device
        self._lock = threading.Lock()
        self._known: dict[Kernel, tuple[Built, Tuning]] = {}

    def build(self, kernels: Sequence[Kernel]) -> list[tuple[Built, Tuning]]:
        """Build the fastest configuration of each of `kernels`.

        Raises:
            BuildError: a kernel for which no configuration can be built.
        """
        with self._lock:  # one at a time on the device, so that they do not disturb each other's timing
            new = [kernel for kernel in dict.fromkeys(kernels) if kernel not in self._known]
            choices = {kernel: self._builder.target.alternatives(kernel)[:MOST_TRIED] for kernel in new}
            kept = {kernel: record.read(self._key(kernel, ways), len(ways)) for kernel, ways in choices.items()}
            pending: list[tuple[Kernel, KernelCandidate]] = []
            for kernel, alternatives in choices.items():
                old = kept[kernel]
                if len(alternatives) > 1:
                    pending += [(kernel, way) for way in (alternatives if old is None else [alternatives[old.chosen]])]
            built = self._build(pending)
            for kernel, alternatives in choices.items():
                self._known[kernel] = self._tuned(kernel, alternatives, kept.get(kernel), built)
            return [self._known[kernel] for kernel in kernels]

    def sources(self, kernel: Kernel) -> list[str]:
        """Return the sources of all configurations of a kernel that count."""
        return [way.source for way in self._builder.target.alternatives(kernel)]

    def key(self, texts: Sequence[str]) -> str:
        """Return the key of the record of measurements for these texts, here."""
        return record.key_of(self.device, self._builder.target.name, texts)

    def _key(self, kernel: Kernel, alternatives: Sequence[KernelCandidate]) -> str:
        return self.key([_without(kernel.origins, way.source) for way in alternatives])

    def _build(self, pairs: Sequence[tuple[Kernel, KernelCandidate]]) -> dict[tuple[Kernel, str], Built | str]:
        """Build each configuration; a text says why one could not be built."""

        def one(pair: tuple[Kernel, KernelCandidate]) -> Built | str:
            kernel, way = pair
            try:
                return Built(kernel, way.source, self._builder.target.build(kernel, way.source))
            except FusionError as error:
                return f"it cannot be built: {brief(error)}"

        with ThreadPoolExecutor(max_workers=max(1, min(len(pairs), os.cpu_count() or 1))) as pool:
            results = list(pool.map(one, pairs))
        return {(kernel, way.source): result for (kernel, way), result in zip(pairs, results, strict=True)}

    def _tuned(
        self,
        kernel: Kernel,
        alternatives: Sequence[KernelCandidate],
        kept: Tuning | None,
        built: Mapping[tuple[Kernel, str], Built | str],
    ) -> tuple[Built, Tuning]:
        if len(alternatives) < 2:
            (default,) = self._builder.build([kernel])
            return default, Tuning(kernel.name, reason="there is nothing to choose")
        results = {way.source: built.get((kernel, way.source), "") for way in alternatives}
        if kept is None:
            kept = self._tried(kernel, alternatives, results)
            if not kept.reason:
                record.write(self._key(kernel, alternatives), kept)
        chosen = results[alternatives[kept.chosen].source]
        if isinstance(chosen, Built) and not kept.reason:
            return chosen, kept
        (default,) = self._builder.build([kernel])
        return default, replace(kept, reason=kept.reason or str(chosen))

    def _tried(
        self, kernel: Kernel, alternatives: Sequence[KernelCandidate], results: Mapping[str, Built | str]
    ) -> Tuning:
        """Check and time the built configurations."""
        capabilities = self._builder.target.capabilities
        trials = [Trial(way.name, predicted(kernel, way.relative_time, capabilities)) for way in alternatives]
        try:
            inputs, after = expected(kernel, self.device)
        except (FusionError, torch.OutOfMemoryError) as error:
            return Tuning(kernel.name, tuple(trials), reason=brief(error))
        right: dict[int, Built] = {}
        for number, way in enumerate(alternatives):
            result = results[way.source]
            refused = result if isinstance(result, str) else self._refused(kernel, result, inputs, after)
            if refused is None and isinstance(result, Built):
                right[number] = result
            else:
                trials[number] = replace(trials[number], refused=str(refused))
        if not right:
            return Tuning(kernel.name, tuple(trials), reason="no configuration gave the right numbers")
        calls = [partial(each.launch, *inputs) for each in right.values()]
        for number, took in zip(right, medians(calls, self.device), strict=True):
            trials[number] = replace(trials[number], measured=took)
        return Tuning(kernel.name, tuple(trials), min(right, key=lambda number: trials[number].measured or 0.0))

    def _refused(
        self, kernel: Kernel, built: Built, inputs: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
    ) -> str | None:
        """Return why a configuration may not win: it fails, or its results are wrong; None if it may."""
        tensors = [clone(tensor) for tensor in inputs]
        read = frozenset[str]().union(*map(loaded, kernel.launched))
        for param, tensor in zip(kernel.params, tensors, strict=True):
            if param.written and param.dtype.is_floating_point and param.name not in read:
                tensor.fill_(float("nan"))  # shows elements that are not written
        try:
            built.launch(*tensors)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:  # whatever fails, this configuration does not run
            return f"it fails: {brief(error)}"
        return wrong(kernel, tensors, after)


class Untuned:
    """Builds kernels in their default configurations, with the interface of a `Tuner`."""

    def __init__(self, builder: KernelBuilder, device: torch.device) -> None:
        self._builder, self.device = builder, device

    def build(self, kernels: Sequence[Kernel]) -> list[tuple[Built, Tuning]]:
        """Build `kernels`.

        Raises:
            BuildError: a kernel that cannot be built.
        """
        return [(built, Tuning(built.kernel.name)) for built in self._builder.build(kernels)]

    def sources(self, kernel: Kernel) -> list[str]:
        """Return the source of a kernel."""
        return [self._builder.target.emit(kernel)]

    def key(self, texts: Sequence[str]) -> str:
        """Return the key of the record of measurements for these texts, here."""
        return record.key_of(self.device, self._builder.target.name, texts)


def _without(origins: Sequence[str], source: str) -> str:
    """Return a source without the lines that name the origins of its operations, which do not count."""
    return "\n".join(line for line in source.splitlines() if line.strip(" */#") not in origins)


def predicted(kernel: Kernel, relative_time: float, capabilities: Capabilities) -> float:
    """Return the microseconds of one launch.

    `relative_time` is relative to the time in which the device, at its full speed, moves all tensors once and computes
    all products.
    """
    sizes = kernel.axis_sizes()
    moved = sum(float(param.extent) * param.dtype.itemsize for param in kernel.params if param.extent.is_Integer)
    rates = capabilities.rates
    time = rates.memory_us(moved)
    for stmt in statements(kernel.body):
        if isinstance(stmt, Fold) and stmt.op == "dot":
            spanned = free_axes(*stmt.args) & sizes.keys()
            points = 2.0
            for symbol in spanned:
                points *= float(sizes[symbol]) if sizes[symbol].is_Integer else 1.0
            time = max(time, rates.product_us_of(points, stmt.args[0].dtype.itemsize))
    return rates.launch_us + time * min(relative_time, 1e3)


__all__ = ["Trial", "Tuner", "Tuning", "Untuned"]
