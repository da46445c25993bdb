"""The benchmarks' own rules: which results may be reported, and that the synthetic graphs are as described."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    cold,
    dynamic,
    generation,
    harness,
    inference,
    memory_speed,
    models,
    modes,
    packed,
    programs,
    saved_step,
    scheduling,
    small,
    suite,
    tables,
    training,
)
from benchmarks.harness import Refused
from benchmarks.memory_speed import BesideMemory
from benchmarks.programs import Case, Draw
from benchmarks.scheduled_models import CheckedNetwork
from benchmarks.small_models import Model
from fusion.quantize import quantized

SMALL = (Draw((16, 32), torch.float32),)


def _inductor(graph, inputs):
    """Stands in for the backend where a benchmark asks for it by name."""
    raise AssertionError("nothing is compiled by it here")


@pytest.fixture
def without_inductor(monkeypatch):
    """Replace inductor by eager: its C++ takes ten seconds to build, and capturing a model as long as for Fusion."""
    compiled = torch.compile

    def stand_in(program, *, backend, mode=None, options=None, **settings):
        if backend == "inductor" or getattr(backend, "backend", backend) is _inductor:
            return program
        return compiled(program, backend=backend, **settings)

    monkeypatch.setattr(torch, "compile", stand_in)
    monkeypatch.setattr(dynamic, "lookup_backend", lambda name: _inductor)


@pytest.mark.usefixtures("without_inductor")
def test_a_case_is_checked_timed_and_shown():
    result = harness.measure(Case("softmax", programs.softmax, SMALL), "cpu", rounds=2)
    assert list(result.seconds) == ["eager", "inductor", "fusion"]
    assert all(seconds > 0 for seconds in result.seconds.values())
    assert result.bytes == 2 * 16 * 32 * 4
    assert tables.row(result).startswith("softmax")
    assert len(tables.row(result).removesuffix("  ~")) == len(tables.header(list(result.seconds), cold=False))


@pytest.mark.usefixtures("without_inductor")
def test_rivals_are_timed_and_gradients_are_checked():
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
        name: harness.closed(case, program, inputs)()
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

    monkeypatch.setattr("fusion.compilation.graph_compiler.compile_graph", broken)
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


@pytest.mark.parametrize("suite", ["cpu", "gpu", "contractions", "inference", "dynamic"])
def test_every_case_has_a_name_of_its_own(suite):
    cases = importlib.import_module(f"benchmarks.{suite}").CASES
    assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize("group", ["product", "attention", "masked", "loss", "quantised", "norm"])
def test_contractions_are_programs_that_fusion_compiles(group):
    """Every program of the group is right, at sizes that a CPU computes quickly."""
    from benchmarks.contractions import CASES

    programs = {case.program: case for case in CASES if case.name.startswith(group + ":")}
    assert programs
    for case in programs.values():
        reduced = replace(
            case, inputs=tuple(_small(draw) for draw in case.inputs), systems=("eager", "fusion"), rivals=()
        )
        assert harness.measure(reduced, "cpu", rounds=2).errors["fusion"] < 2e-2


def _tiny_gpt2(call):
    tiny = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32}
    return models.Model("tiny", lambda: models.gpt2(**tiny), models.tokens(2, 8, 32), call)


@pytest.mark.usefixtures("without_inductor")
def test_a_training_step_is_one_graph_that_is_checked_and_timed():
    """One graph: the loss of GPT-2 is in it, and its logits are not written."""
    torch._dynamo.utils.counters.clear()
    (row,) = training.measured(_tiny_gpt2(models.own_loss), None, "cpu", rounds=2)
    assert row.startswith("tiny")
    assert len(row.split()) == 2 + 2 * len(training.SYSTEMS) + 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("autocast", [False, True])
def test_a_forward_pass_is_checked_and_timed(autocast):
    case = inference.Case(_tiny_gpt2(models.logits), autocast=autocast)
    (row,) = inference.measured(case, "cpu", rounds=2)
    assert row.startswith(case.name)
    assert len(row.removeprefix(case.name).split()) == 1 + len(inference.SYSTEMS) + 1


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("trains", [False, True])
def test_a_small_model_is_checked_and_compared_with_the_better_of_the_others(trains, monkeypatch):
    net = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.Linear(12, 4))
    model = Model("tiny", lambda: net, lambda device: {"input": torch.randn(5, 8)}, trains)
    times = {"eager": [3.0, 4.0, 9.0], "inductor": [6.0, 6.0, 6.0], "fusion": [2.0, 2.0, 1.0]}
    monkeypatch.setattr(small, "wall_seconds_in_turn", lambda calls, device, rounds: times)
    ratios = {}
    (row,) = small.measured(model, "cpu", 3, ratios)
    assert row.split()[:5] == ["tiny", "4000.000", "6000.000", "2000.000", "2.00x"]
    assert ratios == {"tiny": {"eager": 2.0, "inductor": 3.0}}
    errors = iter([1e-3, 1e-3, 3e-3])  # of eager, inductor and Fusion
    monkeypatch.setattr(small, "_error", lambda results, exact: next(errors))
    with pytest.raises(Refused, match="errors"):
        list(small.measured(model, "cpu", 3, {}))


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("bits", [16, 4])
def test_a_step_of_a_language_model_is_checked_and_timed(bits, monkeypatch):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 1}
    case = generation.Case("tiny", sizes, bits, None if bits == 16 else 32)
    took = {"eager": 4e-3, "inductor": 2e-3, "packed": 2e-3, "fusion": 1e-3, "saved": 5e-4}

    def timed(calls, size, threads, rounds):
        assert [*calls] == [name for name in took if bits == 4 or name != "packed"]
        return {name: BesideMemory([took[name]], [5e-4], [1e-3]) for name in calls}

    monkeypatch.setattr(generation, "beside_memory", timed)
    head, *rows = generation.measured(case, 2)
    assert head.startswith(f"tiny, {case.weights}: ")
    assert [row.split(", error")[0].split() for row in rows if "packed" not in row] == [
        ["eager", "250.0", "(0.12", "0.25)"],
        ["inductor", "500.0", "(0.25", "0.50)"],
        ["fusion", "1000.0", "(0.50", "1.00)"],
        ["saved", "2000.0", "(1.00", "2.00)"],
    ]


def test_calls_are_timed_beside_memory_in_turn(monkeypatch):
    clock, order = iter(range(1000)), []
    monkeypatch.setattr(memory_speed.time, "perf_counter", lambda: next(clock))
    calls = {name: lambda name=name: order.append(name) for name in ("one", "other")}
    times = memory_speed.beside_memory(calls, 1 << 20, 2, 3)
    assert order == ["one", "other"] * 4, "the first calls say how often a sample repeats them"
    assert times["one"] == BesideMemory([1] * 3, [1] * 3, [1] * 3)
    uneven = BesideMemory([2.0, 4.0, 9.0], [1.0, 1.0, 9.0], [2.0, 6.0, 9.0])
    assert (uneven.seconds, uneven.of_reading, uneven.of_copying) == (4.0, 0.5, 1.0)


def test_a_saved_step_without_kernels_is_refused(monkeypatch):
    loaded = SimpleNamespace(manifest={"kernels": []})
    monkeypatch.setattr(saved_step.torch.export, "export", lambda *args, **settings: None)
    monkeypatch.setattr(saved_step.fusion, "save", lambda *args, **settings: None)
    monkeypatch.setattr(saved_step.fusion, "load", lambda path: loaded)
    monkeypatch.setattr(saved_step, "Step", lambda *args: torch.nn.Identity())
    with pytest.raises(Refused, match="no generated kernel"):
        saved_step.saved_call(torch.nn.Identity(), None, torch.zeros(1), 0)


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32)])
def test_packed_weights_stand_for_the_same_numbers(bits, group, monkeypatch):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 1}
    case = generation.Case("tiny", sizes, bits, group, 16, ("eager", "packed, tuned"))
    same = BesideMemory([1e-3], [1e-3], [1e-3])
    monkeypatch.setattr(generation, "beside_memory", lambda calls, *_: dict.fromkeys(calls, same))
    _, eager, tuned = generation.measured(case, 2)
    assert eager.split()[1] == "16000.0," and tuned.split()[:3] == ["packed,", "tuned", "16000.0,"]


def test_weights_without_a_product_of_their_own_are_not_packed():
    one = quantized(torch.nn.Linear(64, 8, bias=False), bits=8, group=32)
    odd = quantized(torch.nn.Linear(64, 24, bias=False), bits=4, group=32)
    assert not any(map(packed.packed, (torch.nn.Sequential(one), torch.nn.Sequential(odd), torch.nn.Linear(4, 4))))


def test_a_refused_case_is_printed_and_others_continue(capsys):
    def refused():
        yield "the first row"
        raise Refused("it is wrong")

    assert suite.print_rows([("odd", refused), ("even", lambda: ["another row"])]) == 1
    assert capsys.readouterr().out.splitlines() == ["the first row", "odd: refused: it is wrong", "another row"]
    assert suite.print_rows([("even", list)]) == 0


@pytest.mark.usefixtures("without_inductor")
def test_a_wrong_forward_pass_is_refused(monkeypatch):
    errors = iter([1e-3, 1e-3, 3e-3])  # of eager, inductor and Fusion
    monkeypatch.setattr(inference, "distance", lambda given, exact: next(errors))
    with pytest.raises(Refused, match="errors"):
        list(inference.measured(inference.Case(_tiny_gpt2(models.logits)), "cpu", rounds=2))


TINY = replace(dynamic.NARROW, width=16, heads=2, layers=1, words=32, timed=((3, 12), (2, 9)), longest=20)


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("kind", ["forward", pytest.param("step", marks=pytest.mark.slow)])
def test_code_for_any_size_is_timed_against_code_for_one(kind):
    rows = list(dynamic.sizes(kind, TINY, "cpu", rounds=2))
    assert [row.split()[:2] for row in rows] == [[kind, "3x12"], [kind, "2x9"]]
    assert all(len(row.split()) == 2 + 1 + 3 * len(dynamic.SYSTEMS) for row in rows)


@pytest.mark.usefixtures("without_inductor")
def test_a_loop_over_sizes_counts_compilations_and_judges_each_result(monkeypatch):
    row = dynamic.loop("forward", "fusion", TINY, "cpu", count=4)
    assert row.split()[:5] == ["forward,", "4", "sizes", "fusion", "2"]
    monkeypatch.setattr(dynamic, "MOST", 1)
    with pytest.raises(Refused, match="2 compilations"):
        dynamic.loop("forward", "fusion", TINY, "cpu", count=3)


def test_one_result_that_is_no_number_fails_a_loop():
    model = TINY.model()
    judge, batch = dynamic.Judge("forward", model), TINY.batch("cpu", 2, 5)
    assert judge.ratio(models.logits, batch) <= 1
    assert not judge.ratio(lambda model, batch: models.logits(model, batch) * float("nan"), batch) <= dynamic.ALLOWED
    assert not judge.ratio(lambda model, batch: models.logits(model, batch) + 1, batch) <= dynamic.ALLOWED


def test_wrong_gradients_of_a_step_are_detected():
    judge, batch = dynamic.Judge("step", TINY.model()), TINY.batch("cpu", 2, 5)
    assert judge.ratio(models.own_loss, batch) <= 1
    wrong = judge.ratio(lambda model, batch: _Doubled.apply(models.own_loss(model, batch)), batch)
    assert not wrong <= dynamic.ALLOWED


def test_sizes_of_a_loop_differ_and_none_is_one():
    pairs = dynamic.FULL.changing(50)
    assert len({length for _, length in pairs}) == 50
    assert all(first[0] != second[0] for first, second in pairwise(pairs))
    assert 1 < max(rows for rows, _ in pairs) < min(length for _, length in pairs)


def test_later_processes_start_with_the_cache_of_the_first(monkeypatch):
    started = []

    def run(command, *, env, **settings):
        started.append((command[2:], env["FUSION_CACHE_DIR"], env["TORCHINDUCTOR_CACHE_DIR"]))
        return SimpleNamespace(returncode=0, stdout=json.dumps({"seconds": 3.0 - len(started)}))

    monkeypatch.setattr(harness.subprocess, "run", run)
    assert harness.start_seconds("dynamic", "start", "fusion") == [2.0, 1.0]
    assert started[0] == started[1]
    assert harness.cold_seconds("dynamic", "start", "fusion") == 0.0
    assert started[2][1] != started[0][1]


@pytest.mark.usefixtures("without_inductor")
def test_a_start_is_prepared_first_and_its_compilation_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(dynamic, "SCALE", TINY)
    monkeypatch.setattr(dynamic, "DEVICE", "cpu")
    cold.main("dynamic", "start", "fusion")
    assert json.loads(capsys.readouterr().out)["seconds"] > 0


def _small(draw):
    """Divide large sizes by sixty-four."""
    shape = tuple(size if size < 512 else size // 64 for size in draw.shape)
    return replace(draw, shape=shape, high=draw.high if draw.high < 512 else draw.high // 64)


def test_a_model_beyond_its_budget_of_compile_time_fails(capsys, monkeypatch):
    pixels = lambda device: {"pixels": torch.randn(2, 3, 64, 64, device=device)}  # noqa: E731
    tiny = scheduling.Model("tiny", lambda: CheckedNetwork(4, count=1, stages=2), pixels, training=True)
    monkeypatch.setattr(scheduling, "models", lambda: (tiny,))
    monkeypatch.setattr(scheduling, "compiled", cache(scheduling.compiled))  # once for both budgets
    monkeypatch.setattr(scheduling, "_synthetic", lambda only, quick: 1e6)
    assert scheduling.run(only="", quick=True) == 0
    graphs, operations, *_ = capsys.readouterr().out.splitlines()[1].split()[1:]
    assert int(graphs) >= 4 and int(operations) > 50
    monkeypatch.setattr(scheduling, "_synthetic", lambda only, quick: 1e-6)
    assert scheduling.run(only="", quick=True) == 1
    assert "tiny takes longer than its budget" in capsys.readouterr().out


@pytest.mark.parametrize("kind", scheduling.KINDS)
def test_synthetic_graphs_are_lowered_completely(kind):
    seconds, kernels = scheduling.timed(kind(60))
    assert set(seconds) == set(scheduling.STAGES)
    assert 1 <= kernels < 10


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("trained", [False, True])
def test_models_are_compared_with_every_mode(trained):
    def make():
        return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))

    def batch(device):
        return {"images": torch.randn(8, 16, device=device), "labels": torch.randint(4, (8,), device=device)}

    call = models.classified if trained else models.classes
    case, waited = modes.Case(models.Model("small", make, batch, call), trained), []
    answer = modes.answer(case, "cpu", 1, lambda: waited.append(True))
    assert waited and answer["seconds"].keys() == modes.SYSTEMS.keys() and answer["error"] <= modes.ALLOWED
    assert case.name in modes._row(case, answer)


def test_the_better_mode_counts_against_the_best_rival():
    seconds = {"eager": 4.0, "fusion": 3.0, "fusion, graphs": 2.0, "inductor": 5.0, "inductor, tuned": 3.0}
    assert modes._share(seconds) == 1.5


def test_the_models_of_the_modes_are_twelve_and_eight():
    assert [sum(case.trained is trained for case in modes.CASES) for trained in (False, True)] == [12, 8]
    assert len({case.name for case in modes.CASES}) == 20
