"""The benchmarks' own rules: what may be reported, and that the synthetic graphs are what they say."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from benchmarks import harness, programs, scheduling, tables
from benchmarks.harness import Refused
from benchmarks.programs import Case, Draw

SMALL = (Draw((16, 32), torch.float32),)


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
    assert list(result.seconds) == ["eager", "inductor", "fusion"]
    assert all(seconds > 0 for seconds in result.seconds.values())
    assert result.bytes == 2 * 16 * 32 * 4
    assert tables.row(result).startswith("softmax")
    assert len(tables.row(result).removesuffix("  ~")) == len(tables.header(list(result.seconds), cold=False))


@pytest.mark.usefixtures("without_inductor")
def test_rivals_run_beside_and_gradients_are_checked():
    case = Case("softmax", programs.softmax, SMALL, (("one call", lambda x: x.softmax(-1)),), gradients=True)
    result = harness.measure(case, "cpu", rounds=2)
    assert list(result.seconds) == ["eager", "inductor", "fusion", "one call"]
    assert result.bytes == 3 * 16 * 32 * 4
    assert "against one call" in tables.summary([result], 1)[0]


class _Doubled(torch.autograd.Function):
    """The identity, with a gradient that is wrong."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_a_wrong_gradient_is_refused():
    case = Case("softmax", programs.softmax, SMALL, gradients=True)
    inputs = case.make("cpu")
    results = {
        name: harness._closed(case, program, inputs)()
        for name, program in {
            "eager": programs.softmax,
            "fusion": lambda x: programs.softmax(_Doubled.apply(x)),
        }.items()
    }
    with pytest.raises(Refused, match="error"):
        harness._errors(case, inputs, results)


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
    assert harness._errors(case, inputs, {"eager": (right,), "fusion": (right,)})["fusion"] < 1e-6
    for wrong in (right + 1e-3, right * float("nan")):
        with pytest.raises(Refused, match="error"):
            harness._errors(case, inputs, {"eager": (right,), "fusion": (wrong,)})


def test_inputs_are_random_and_the_same_each_time():
    case = programs.cross_entropy_case(4, 10, torch.float32)
    first, second = case.make("cpu"), case.make("cpu")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].std() > 0.5
    assert set(first[1].tolist()) <= set(range(10))


@pytest.mark.parametrize("suite", ["cpu", "gpu", "contractions"])
def test_every_case_has_a_name_of_its_own(suite):
    cases = importlib.import_module(f"benchmarks.{suite}").CASES
    assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize("group", ["product", "attention", "masked", "loss", "quantised", "norm"])
def test_contractions_are_programs_that_fusion_compiles(group):
    """Every program of the group, with sizes that a CPU does at once, is right."""
    from benchmarks.contractions import CASES

    programs = {case.program: case for case in CASES if case.name.startswith(group + ":")}
    assert programs
    for case in programs.values():
        small = replace(
            case, inputs=tuple(_small(draw) for draw in case.inputs), systems=("eager", "fusion"), rivals=()
        )
        assert harness.measure(small, "cpu", rounds=2).errors["fusion"] < 2e-2


def _small(draw):
    """What is large, a sixty-fourth."""
    shape = tuple(size if size < 512 else size // 64 for size in draw.shape)
    return replace(draw, shape=shape, high=draw.high if draw.high < 512 else draw.high // 64)


@pytest.mark.parametrize("kind", scheduling.KINDS)
def test_synthetic_graphs_are_lowered_completely(kind):
    seconds, kernels = scheduling.timed(kind(60))
    assert set(seconds) == set(scheduling.STAGES)
    assert 1 <= kernels < 10
