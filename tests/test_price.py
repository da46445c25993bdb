"""The price benchmark: its statistics, the kinds of kernels, and a run over two small programs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import price
from benchmarks.price import programs, regret, tables
from benchmarks.price.agreement import deviation, mean_regret, rank_correlation
from benchmarks.price.cases import cases
from benchmarks.price.measured import KernelTime, Subject, measure, of_case, of_model
from benchmarks.price.pace import Probe, between, probed
from benchmarks.price.regret import CHOSEN, Configurations, Regret, regret_of
from benchmarks.programs import Case, Draw, softmax
from benchmarks.small_models import Model, models
from fusion.codegen.c.target import CTarget
from fusion.codegen.target import KernelCandidate
from fusion.lowering.errors import BuildError

F32, I64 = torch.float32, torch.int64


def _matrix(*shape: int) -> Draw:
    return Draw(shape, F32)


def test_the_deviation_is_the_same_in_both_directions() -> None:
    assert deviation([1.0, 1.0]) == 1.0
    assert deviation([2.0, 0.5]) == deviation([4.0, 1.0]) == pytest.approx(2.0)


def test_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 300, 4000]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # 1 - 6 Σd² / (n (n² - 1)) with d = 0, 1, 1, 0
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 1, 2], [5, 6, 7]) == pytest.approx(math.sqrt(3) / 2)
    assert math.isnan(rank_correlation([1.0, 1.0], [1.0, 2.0]))


def test_mean_regret_is_geometric() -> None:
    assert mean_regret([0.0, 0.0]) == 0.0
    assert mean_regret([1.0, 0.0]) == pytest.approx(math.sqrt(2) - 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_program_has_a_name_of_its_own(device: str) -> None:
    assert len({case.name for case in cases(device)}) == len(cases(device)) >= 140
    assert len({model.name for model in models(device)}) == len(models(device))


@pytest.mark.parametrize(
    ("program", "inputs", "kinds"),
    [
        (programs.exponentials, (_matrix(8, 30),), {"map"}),
        (programs.transposed_add, (_matrix(8, 30), _matrix(30, 8)), {"turned map"}),
        (programs.row_sum, (_matrix(8, 30),), {"row fold"}),
        (programs.column_sum, (_matrix(8, 30),), {"column fold"}),
        (programs.running_sum, (_matrix(8, 30),), {"scan"}),
        (programs.embedding, (Draw((5,), I64), _matrix(8, 30)), {"gather"}),
        (programs.added_rows, (_matrix(3000, 8), Draw((2000,), I64), _matrix(2000, 8)), {"map", "scatter"}),
    ],
)
def test_kernels_have_kinds(program, inputs, kinds) -> None:
    kernels, calls = measure(of_case(Case("case", program, inputs)), "cpu")
    assert {kernel.kind for kernel in kernels} == kinds and not calls
    assert all(kernel.measured > 0 and kernel.predicted and kernel.bytes > 0 for kernel in kernels)


def test_two_programs_are_measured_and_written(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setitem(tables.LEAST, "cpu", 0.0)
    small = (
        Case("softmax 16x32", softmax, (_matrix(16, 32),)),
        Case("linear", programs.linear_gelu, (_matrix(128, 256), _matrix(96, 256), _matrix(96)), gradients=True),
    )
    monkeypatch.setattr(price, "_subjects", lambda device, quick: {case.name: of_case(case) for case in small})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "figures.json"
    assert price.run(only="", quick=True, json=str(file)) == 0
    figures = json.loads(file.read_text())
    assert {each["program"] for each in figures["kernels"]} == {case.name for case in small}
    assert all(each["ratio"] == each["measured"] / each["predicted"] for each in figures["kernels"])
    assert {each["program"] for each in figures["calls"]} == {"linear"} and not figures["refused"]
    assert [each["name"] for each in figures["programs"]] == [case.name for case in small]
    assert all(each["regret"] >= 0 and {"chosen", "eager"} <= each["times"].keys() for each in figures["programs"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("row fold") for line in lines)
    assert any(line.startswith("regret, 2 programs: ") for line in lines)
    assert lines[-1].startswith("2 and 2 of 2 programs in ")
    assert price.run(only="nothing of this name", quick=True) == 2


@pytest.mark.slow
def test_processes_share_the_programs(capfd) -> None:
    """The figures of both processes are in the tables, in the order of the programs."""
    assert price.run(only="running_sum", quick=True, jobs=2) == 0
    out = capfd.readouterr().out
    names = [name for name in price._subjects("cpu", True) if "running_sum" in name]
    assert names and all(out.count(f"{name}: ") >= 2 for name in names)
    assert f"{len(names)} and {len(names)} of {len(names)} programs in " in out


def test_a_program_that_fails_is_refused_and_the_others_go_on(monkeypatch, capsys) -> None:
    def broken(device: str):
        raise torch.OutOfMemoryError("no memory")

    subjects = [Subject("broken", broken), of_case(Case("softmax", softmax, (_matrix(16, 32),)))]
    monkeypatch.setattr(price, "_subjects", lambda device, quick: {subject.name: subject for subject in subjects})
    assert price.run(only="", quick=True) == 1
    out = capsys.readouterr().out
    assert "broken: refused: no memory" in out and "softmax: 1 kernel" in out


def test_a_model_is_measured_with_its_gradients() -> None:
    model = Model("two layers", lambda: torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.GELU()), _batch, True)
    kernels, _ = measure(of_model(model), "cpu")
    assert any("backward" in kernel.kernel for kernel in kernels)


def _batch(device: str) -> dict[str, torch.Tensor]:
    return {"input": torch.randn(3, 8, device=device)}


def test_the_table_names_the_farthest_first() -> None:
    kernels = [KernelTime("p", f"k{k}", "map", 100.0, 100.0 * ratio, 1) for k, ratio in enumerate((1.0, 3.0, 0.2))]
    lines = list(tables.agreement_table([*kernels, KernelTime("p", "tiny", "map", 1.0, 20.0, 1)], "cpu"))
    named = [line.rsplit(" ", 1)[-1] for line in lines if " / k" in line]
    assert named == ["k2", "k1", "k0"]
    assert lines[-1] == "left out: 0 kernels without a price, 1 below 50 µs"


def test_a_machine_that_was_slower_is_told_from_a_wrong_price() -> None:
    """Two kernels took twice as long as predicted; one of them while memory did, too."""
    slow, fast = Probe("memory", 80.0), Probe("memory", 40.0)
    kernels = [KernelTime("p", f"k{k}", "map", 100.0, 200.0, 1, probe) for k, probe in enumerate((slow, fast))]
    lines = list(tables.agreement_table(kernels, "cpu"))
    figures = next(line for line in lines if line.startswith("all")).split()
    assert figures == ["all", "2", "2.00x", "2.00x", "nan", "1.41x"]
    assert "beside its best, the machine took 2.00 x as long in the median, 2.00 x at worst" in lines


def test_every_part_of_a_price_has_a_probe() -> None:
    before = probed("cpu")
    assert before.keys() == {"memory", "scalars", "products"} and min(before.values()) > 0
    assert between({"memory": 10.0}, {"memory": 40.0}, "memory") == Probe("memory", 20.0)
    assert probed("cuda") == {} and between({}, {}, "memory") is None


def test_regret_is_the_time_lost_against_the_best() -> None:
    assert Regret("p", {CHOSEN: 3.0, "eager": 2.0, "unfused": 4.0}).regret == 0.5
    assert Regret("p", {CHOSEN: 3.0, "eager": 2.0, "unfused": 4.0}).best == "eager"
    assert Regret("p", {CHOSEN: 1.0, "eager": 2.0}).regret == 0.0
    found = [Regret("p", {CHOSEN: 2.0, "eager": 1.0}), Regret("q", {CHOSEN: 1.0, "eager": 2.0})]
    _, head, *rows = tables.regret_table("programs", found)
    assert head == "regret, 2 programs: 41.4% in the geometric mean, worst 100.0%"
    assert rows == ["  100.0%        2.0        1.0  p: eager"]


def _product_case() -> Case:
    return Case("linear", programs.linear_gelu, (_matrix(128, 256), _matrix(96, 256), _matrix(96)))


def test_alternatives_are_built_and_equal_ones_are_left_out() -> None:
    found = regret_of(of_case(_product_case()), "cpu", rounds=2)
    assert found.times.keys() == {CHOSEN, "eager", "products generated"}
    assert all(time > 0 for time in found.times.values())
    apart = regret_of(of_case(Case("softmax", softmax, (_matrix(16, 32),))), "cpu", rounds=2)
    assert apart.times.keys() == {CHOSEN, "eager", "unfused"}


def test_wrong_results_are_no_alternative(monkeypatch) -> None:
    monkeypatch.setattr(regret, "distance", lambda ours, theirs: 1.0)
    found = regret_of(of_case(_product_case()), "cpu", rounds=2)
    assert found.times.keys() == {CHOSEN, "eager"}


def test_attention_is_compared_with_the_other_side() -> None:
    case = Case("attention", programs.fused_causal_attention, (_matrix(1, 4, 512, 64),) * 3)
    names = regret_of(of_case(case), "cpu", rounds=2).times.keys()
    assert len(names & {"attention generated", "attention by the library"}) == 1


class _Several(CTarget):
    """A target with more configurations than C has: one that is right, a wrong one, and one that cannot be built."""

    def alternatives(self, kernel):
        names = ("default", "right", "wrong", "unbuildable")
        return tuple(KernelCandidate(name, name) for name in names)

    def build(self, kernel, source):
        if source == "unbuildable":
            raise BuildError("it cannot be built")
        launch = super().build(kernel, self.emit(kernel))

        def wrong(*tensors):
            launch(*tensors)
            tensors[-1].mul_(2)

        return wrong if source == "wrong" else launch


def test_configurations_are_tried_on_the_tensors_of_a_call() -> None:
    watch = Configurations(_Several(), "softmax")
    case = Case("softmax", softmax, (_matrix(16, 32),))
    call, _ = regret._built(of_case(case).prepare("cpu"), regret.PRICED, watch)
    (found,) = watch.regrets
    assert found.times.keys() == {CHOSEN, "right"} and found.name.startswith("softmax / ")
    torch.testing.assert_close(call()[0], softmax(*case.make("cpu")))
