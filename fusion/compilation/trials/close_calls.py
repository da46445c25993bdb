"""Measures close calls: ways to compute a product whose predicted times differ by less than the error of prices.

Input: a cluster around a product with its alternatives (a `Measure`, as `measure.py`); output: the fastest of the
alternatives that are close to the best prediction, by measurement.  The others are left to their predictions.

Measurements are recorded in the cache directory, so that later compilations decide alike without measuring.  Trials
take at most a tenth of the time that this process has spent compiling, so a small graph gets none, and the products of
a large graph that take longest are tried first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fusion.codegen.target import Capabilities
from fusion.codegen.tuning import Tuning
from fusion.compilation.trials.measure import Trials
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Program
from fusion.schedule.clusters.alternatives import Alternative, weighed
from fusion.schedule.clusters.legality import Cluster

CLOSE = 1.25
"""Predictions within this factor of the best one are close: prices are off by as much."""

SHARE = 0.1
"""The share of the time of compilation that trials may take."""

LAUNCHES = 20.0
"""The time of a product, in launches, from which a trial is worthwhile."""


class Clock:
    """The seconds that this process compiles, and the part that trials take.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled = self._tried = 0.0
        self._longest = 0.0
        self._begun: dict[int, float] = {}  # thread → when its compilation began

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Count the time inside as compilation; only the outermost of nested ones counts."""
        thread = threading.get_ident()
        if thread in self._begun:
            yield
            return
        self._begun[thread] = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._compiled += time.perf_counter() - self._begun.pop(thread)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Count the time inside as a trial, or as the search for its record."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begun
            with self._lock:
                self._tried += took
                self._longest = max(self._longest, took)

    def has_time(self, first: float) -> bool:
        """Return whether another trial, which takes as long as any before did, stays within the share.

        Args:
            first: seconds that the first trial is expected to take.
        """
        with self._lock:
            now = time.perf_counter()
            compiled = self._compiled + sum(now - begun for begun in self._begun.values())
            return self._tried + (self._longest or first) <= SHARE * compiled


CLOCK = Clock()
"""That of this process."""


class CloseCalls:
    """Measures the alternatives of products where they are close; equal products once.

    Args:
        capabilities: of the device: the time of a launch and of a first trial.
    """

    def __init__(self, trials: Trials, capabilities: Capabilities, clock: Clock = CLOCK) -> None:
        self._trials, self._clock, self._first = trials, clock, capabilities.trial
        self._least = LAUNCHES * capabilities.rates.launch_us
        self._known: dict[tuple[object, ...], Tuning] = {}

    def __call__(self, program: Program, cluster: Cluster, kernel: Kernel, ways: Sequence[Alternative]) -> Tuning:
        """Decide for a cluster, as `schedule.clusters.alternatives.Measure`."""
        predicted = weighed(kernel, ways)
        best = min(way.predicted for way in ways)
        close = [number for number, way in enumerate(ways) if way.predicted <= CLOSE * best]
        if best < self._least or len(close) < 2 or close[0] != 0:
            return predicted
        key = (replace(kernel, name=""), tuple((way.name, way.predicted) for way in ways))
        if key not in self._known:
            with self._clock.trying():
                alternatives = [ways[number] for number in close]
                tried = self._trials(program, cluster, kernel, alternatives, lambda: self._clock.has_time(self._first))
            self._known[key] = tried
        return _among(predicted, close, self._known[key])


def _among(predicted: Tuning, close: Sequence[int], tried: Tuning) -> Tuning:
    """Return a decision between all ways, given the trials of the close ones."""
    if tried.reason:
        return predicted
    trials = list(predicted.trials)
    for number, trial in zip(close, tried.trials, strict=True):
        trials[number] = trial
    return replace(predicted, trials=tuple(trials), chosen=close[tried.chosen])
