"""Under `mode="max-autotune"` measurements decide how a product is computed, and are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by

import fusion
import fusion.compilation.trials.measure
from fusion.codegen.tuning import Tuning
from fusion.inspect.explanation import Explanation

OPTIONS = {"target": "reference", "strict": True}


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(F.linear(x, w, b))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Return times from a table instead of the clock, call by call; the timed function runs."""
    said: list[list[float]] = []

    def medians(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
        for call in calls:
            call()
        return said.pop(0)

    monkeypatch.setattr(fusion.compilation.trials.measure, "medians", medians)
    return said


def inputs(rows: int = 7, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, dtype=dtype) for shape in ((rows, 24), (20, 24), (20,)))


def explained(function: Callable[..., torch.Tensor], *given: torch.Tensor, **settings: object) -> Explanation:
    return fusion.explain(function, mode="max-autotune", options=OPTIONS, **settings)(*given)


def weighed(result: Explanation) -> Tuning:
    (tuning,) = [tuning for tuning in result.graphs[0].tunings if tuning.trials]
    return tuning


@pytest.mark.parametrize("times", [[1.0, 2.0], [2.0, 1.0]], ids=["one kernel", "library"])
def test_the_faster_way_is_taken(times: list[float], measured: list[list[float]]) -> None:
    measured.append(times)
    explanation = explained(linear, *inputs())
    tuning = weighed(explanation)
    assert [(trial.name, trial.measured) for trial in tuning.trials] == [
        ("one kernel", times[0]),
        ("the library", times[1]),
    ]
    generated = times[0] < times[1]
    assert tuning.chosen == (0 if generated else 1)
    assert [extern.name for extern in explanation.externs] == ([] if generated else ["aten.mm.default"])
    assert f"→ {'one kernel' if generated else 'the library'}: predicted" in str(explanation)


def test_measurements_are_cached(measured: list[list[float]]) -> None:
    measured.append([2.0, 1.0])
    first = explained(linear, *inputs())
    again = explained(linear, *inputs())  # the clock has nothing left to say
    assert weighed(again) == weighed(first)


def test_equal_layers_are_measured_once(measured: list[list[float]]) -> None:
    measured.append([2.0, 1.0])

    def layers(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return linear(linear(linear(x, w, b), w, b), w, b)

    explanation = explained(layers, torch.randn(7, 20), torch.randn(20, 20), torch.randn(20))
    assert len(explanation.externs) == 3 and not measured


def test_other_sizes_are_measured_for_themselves(measured: list[list[float]]) -> None:
    measured += [[2.0, 1.0], [1.0, 2.0]]
    assert weighed(explained(linear, *inputs())).chosen == 1
    assert weighed(explained(linear, *inputs(9))).chosen == 0


def test_a_way_with_wrong_numbers_is_refused(measured: list[list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    measured.append([5.0])
    splice = getattr(fusion.compilation.trials.measure, "splice")  # noqa: B009  # its import

    def wrong(schedule: object, built: dict[object, object]) -> object:
        module = splice(schedule, built)
        if not any(step for step in schedule.steps if hasattr(step, "target")):  # type: ignore[attr-defined]
            forward = module.forward
            module.forward = lambda args: tuple(result * 1.01 for result in forward(args))
        return module

    monkeypatch.setattr(fusion.compilation.trials.measure, "splice", wrong)
    tuning = weighed(explained(linear, *inputs()))
    assert tuning.chosen == 1 and "error" in tuning.trials[0].refused and tuning.trials[1].measured == 5.0


def test_results_are_right_in_either_way() -> None:
    given = inputs(dtype=torch.float64)
    fused = fusion.fuse(linear, mode="max-autotune", options=OPTIONS)
    torch.testing.assert_close(fused(*given), linear(*given))


def test_unknown_sizes_are_predicted() -> None:
    explanation = explained(linear, *inputs(), dynamic=True)
    assert "sizes are not known" in weighed(explanation).reason
    assert all(trial.measured is None for trial in weighed(explanation).trials)


def test_a_gather_reads_inside_its_table(measured: list[list[float]]) -> None:
    measured.append([1.0, 2.0])

    def embedded(table: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(F.embedding(ids, table) @ w)

    explanation = explained(embedded, torch.randn(5, 24), torch.randint(0, 5, (9,)), torch.randn(24, 20))
    assert not weighed(explanation).reason and weighed(explanation).trials[0].measured == 1.0


def test_without_tuning_the_ledger_has_both_predictions() -> None:
    explanation = fusion.explain(linear, options=OPTIONS)(*inputs())
    assert [trial.name for trial in weighed(explanation).trials] == ["one kernel", "the library"]
    assert all(trial.predicted > 0 and trial.measured is None for trial in weighed(explanation).trials)
    assert "one kernel: predicted" in str(explanation)
