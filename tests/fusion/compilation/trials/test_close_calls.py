"""Close predictions are decided by measurement, within a share of the compile time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fusion
import fusion.compilation.trials.close_calls
from fusion.codegen.price import Rates
from fusion.codegen.reference import ReferenceTarget
from fusion.codegen.tuning import Trial, Tuning
from fusion.compilation.trials.close_calls import SHARE, Clock, CloseCalls
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Program
from fusion.schedule.clusters.alternatives import Alternative, weighed
from fusion.schedule.clusters.legality import Cluster
from tests.codegen.kernels.products import matmul

CAPABILITIES = replace(ReferenceTarget().capabilities, rates=Rates(1.0, 1e6, 1e6, 1e6))
KERNEL = matmul(8, 8, 8)
PROGRAM = Program((), {}, (), ())


class FakeTrials:
    """Trials whose outcomes are given: name → microseconds."""

    def __init__(self, measured: dict[str, float], *, recorded: bool = False) -> None:
        self.measured, self.is_recorded = measured, recorded
        self.asked: list[list[str]] = []

    def __call__(
        self,
        program: Program,
        cluster: Cluster,
        kernel: Kernel,
        ways: Sequence[Alternative],
        allowed: Callable[[], bool],
    ) -> Tuning:
        if not self.is_recorded and not allowed():
            return weighed(kernel, ways, "there was no time")
        self.asked.append([way.name for way in ways])
        trials = tuple(Trial(way.name, way.predicted, self.measured[way.name]) for way in ways)
        return Tuning("k", trials, min(range(len(ways)), key=lambda number: self.measured[ways[number].name]))


def decided(trials: FakeTrials, clock: Clock, **predicted: float) -> tuple[str, list[float | None]]:
    """Return the name of the way that is taken, and what was measured of each."""
    ways = [Alternative(name, time) for name, time in predicted.items()]
    calls = CloseCalls(trials, CAPABILITIES, clock)  # type: ignore[arg-type]  # as trials, but for where times come from
    tuning = calls(PROGRAM, None, KERNEL, ways)  # type: ignore[arg-type]  # no trial looks at it
    again = calls(PROGRAM, None, replace(KERNEL, name="other"), ways)  # type: ignore[arg-type]
    assert again.chosen == tuning.chosen and len(trials.asked) <= 1
    return tuning.trials[tuning.chosen].name, [trial.measured for trial in tuning.trials]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Yield a clock on which hours of compilation have passed."""
    clock = Clock()
    with clock.compiling():
        monkeypatch.setattr(
            fusion.compilation.trials.close_calls.time,
            "perf_counter",
            lambda now=fusion.compilation.trials.close_calls.time.perf_counter: now() + 1e4,
        )
        yield clock


def test_the_fastest_of_close_predictions_is_taken(late: Clock) -> None:
    trials = FakeTrials({"one": 90.0, "library": 70.0})
    assert decided(trials, late, one=100.0, parts=140.0, library=110.0) == ("library", [90.0, None, 70.0])
    assert trials.asked == [["one", "library"]]


@pytest.mark.parametrize(
    "predicted", [{"one": 100.0, "library": 130.0}, {"one": 10.0, "library": 10.1}, {"one": 100.0}], ids=str
)
def test_what_is_clear_or_small_is_not_measured(predicted: dict[str, float], late: Clock) -> None:
    trials = FakeTrials({"one": 9e9, "library": 0.0})
    assert decided(trials, late, **predicted)[0] == "one" and not trials.asked


def test_without_time_predictions_decide_but_records_count() -> None:
    trials = FakeTrials({"one": 90.0, "library": 70.0})
    assert decided(trials, Clock(), one=100.0, library=110.0) == ("one", [None, None]) and not trials.asked
    recorded = FakeTrials({"one": 90.0, "library": 70.0}, recorded=True)
    assert decided(recorded, Clock(), one=100.0, library=110.0)[0] == "library"


def test_trials_take_a_share_of_the_time_of_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(fusion.compilation.trials.close_calls.time, "perf_counter", lambda: now)
    clock, count = Clock(), 0
    with clock.compiling(), clock.compiling():  # nested: counted once
        for _ in range(1000):
            now += 0.1
            if clock.has_time(0.5):
                with clock.trying():
                    now += 0.5
                count += 1
    assert 0.8 * SHARE * now <= 0.5 * count <= SHARE * now


def test_a_first_trial_that_takes_long_waits_for_a_long_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(fusion.compilation.trials.close_calls.time, "perf_counter", lambda: now)
    clock = Clock()
    with clock.compiling():
        now = 10.0
        assert clock.has_time(0.4) and not clock.has_time(2.5)
        now = 25.0
        assert clock.has_time(2.5)
        with clock.trying():
            now += 0.5
        assert clock.has_time(2.5)  # it took less, and so will the next one


@pytest.mark.parametrize("wanted", [True, False])
def test_an_option_switches_them_off(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: Clock
) -> None:
    """On the reference target, with a library that is as fast as one kernel: both are run, and agree."""
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fusion.compilation.trials.close_calls, "CLOSE", 1e9)
    monkeypatch.setattr(fusion.compilation.trials.close_calls, "LAUNCHES", 0.0)
    monkeypatch.setattr(fusion.compilation.trials.close_calls.CloseCalls.__init__, "__defaults__", (late,))
    options = {"target": "reference", "strict": True, "close_calls": wanted}
    found = fusion.explain(lambda x, w: torch.relu(x @ w), options=options)(torch.randn(7, 24), torch.randn(24, 20))
    (tuning,) = (tuning for graph in found.graphs for tuning in graph.tunings)
    assert all((trial.measured is not None) is wanted for trial in tuning.trials) and len(tuning.trials) > 1
    assert bool(list(tmp_path.rglob("tuned/*.json"))) is wanted
