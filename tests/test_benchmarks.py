"""The benchmarks' own rules: what may be reported, and that the synthetic graphs are what they say."""

from __future__ import annotations

import pytest
import torch

from benchmarks import harness, programs, scheduling
from benchmarks.harness import Refused
from benchmarks.programs import Case

SMALL = (((16, 32), torch.float32),)


@pytest.fixture
def without_inductor(monkeypatch):
    """Its C++ takes ten seconds to build, and nothing here is about it."""
    compiled = torch.compile

    def stand_in(program, *, backend, **settings):
        return compiled(program, backend="eager" if backend == "inductor" else backend, **settings)

    monkeypatch.setattr(torch, "compile", stand_in)


@pytest.mark.usefixtures("without_inductor")
def test_a_case_is_checked_timed_and_shown():
    result = harness.measure(Case("softmax", programs.softmax, SMALL), "cpu", rounds=2)
    assert set(result.seconds) == set(harness.SYSTEMS)
    assert all(seconds > 0 for seconds in result.seconds.values())
    assert result.bytes == 2 * 16 * 32 * 4
    assert harness.row(result).startswith("softmax")


@pytest.mark.usefixtures("without_inductor")
def test_a_case_without_a_kernel_is_refused():
    with pytest.raises(Refused, match="generated no kernel"):
        harness.measure(Case("inverse", lambda x: torch.linalg.pinv(x), SMALL), "cpu", rounds=1)


@pytest.mark.usefixtures("without_inductor")
def test_a_fallback_to_eager_is_refused(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("a defect")

    monkeypatch.setattr("fusion.backend.compile_graph", broken)
    monkeypatch.setenv("FUSION_STRICT", "0")
    with pytest.raises(Exception, match="a defect"):
        harness.measure(Case("softmax", programs.softmax, SMALL), "cpu", rounds=1)


def test_a_wrong_or_nan_result_is_refused():
    case = Case("softmax", programs.softmax, SMALL)
    inputs = case.make("cpu")
    right = programs.softmax(*inputs)
    assert harness._errors(case, inputs, {"eager": right, "fusion": right})["fusion"] < 1e-6
    for wrong in (right + 1e-3, right * float("nan")):
        with pytest.raises(Refused, match="error"):
            harness._errors(case, inputs, {"eager": right, "fusion": wrong})


def test_inputs_are_random_and_the_same_each_time():
    case = programs.cross_entropy_case(4, 10, torch.float32)
    first, second = case.make("cpu"), case.make("cpu")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].std() > 0.5
    assert set(first[1].tolist()) <= set(range(10))


def test_every_cpu_case_has_a_name_of_its_own():
    from benchmarks.cpu import CASES

    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("kind", scheduling.KINDS)
def test_synthetic_graphs_are_lowered_completely(kind):
    seconds, kernels = scheduling.timed(kind(60))
    assert set(seconds) == set(scheduling.STAGES)
    assert 1 <= kernels < 10
