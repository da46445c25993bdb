"""Tuning: the fastest correct configuration wins, and is recorded by name."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import sympy
import torch

from fusion.codegen.build import KernelBuilder
from fusion.codegen.cache import put
from fusion.codegen.cache.folders import Folder
from fusion.codegen.reference import ReferenceTarget
from fusion.codegen.target import KernelCandidate, Launcher, Stage
from fusion.codegen.targets import TARGETS
from fusion.codegen.tuning import Tuner
from fusion.codegen.tuning.check import wrong
from fusion.codegen.tuning.inputs import expected
from fusion.lowering.errors import BuildError, Unsupported
from fusion.lowering.interpret import run_kernel
from fusion.lowering.ir.kernel import Kernel, Role
from tests.codegen.kernels.making import F16, I64, param
from tests.codegen.kernels.pointwise import flipped, gather
from tests.codegen.kernels.products import matmul
from tests.codegen.kernels.rows import softmax

pytestmark = pytest.mark.usefixtures("without_disassembly")

CPU = torch.device("cpu")
Run = Callable[[Kernel, Sequence[torch.Tensor]], None]


def right(kernel: Kernel, tensors: Sequence[torch.Tensor]) -> None:
    run_kernel(kernel, tensors)


def slow(kernel: Kernel, tensors: Sequence[torch.Tensor]) -> None:
    time.sleep(0.05)
    run_kernel(kernel, tensors)


def off(kernel: Kernel, tensors: Sequence[torch.Tensor]) -> None:
    run_kernel(kernel, tensors)
    tensors[-1].mul_(1.05)


def partial(kernel: Kernel, tensors: Sequence[torch.Tensor]) -> None:
    kept = tensors[-1][:1].clone()
    run_kernel(kernel, tensors)
    tensors[-1][:1] = kept


def greedy(kernel: Kernel, tensors: Sequence[torch.Tensor]) -> None:
    run_kernel(kernel, tensors)
    tensors[0].zero_()


def failing(kernel: Kernel, tensors: Sequence[torch.Tensor]) -> None:
    raise RuntimeError("an illegal instruction was encountered")


WAYS: dict[str, Run] = {
    "slow": slow,
    "off": off,
    "partial": partial,
    "greedy": greedy,
    "failing": failing,
    "unbuilt": right,
    "right": right,
}


class Several(ReferenceTarget):
    """A target with a correct but slow configuration, a fast one, and all kinds of wrong ones."""

    name = "several"

    def __init__(self, names: Sequence[str] = tuple(WAYS)) -> None:
        super().__init__()
        self.names, self.built = names, list[str]()

    def alternatives(self, kernel: Kernel) -> Sequence[KernelCandidate]:
        return [KernelCandidate(name, f"{name}\n{self.emit(kernel)}") for name in self.names]

    def build(self, kernel: Kernel, source: str) -> Launcher:
        name = source.partition("\n")[0]
        self.built.append(name)
        if name == "unbuilt":
            raise BuildError("too much shared memory")

        def launch(*tensors: torch.Tensor | int) -> None:
            WAYS.get(name, right)(kernel, [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)])

        return launch

    def stages(self, kernel: Kernel, source: str) -> Iterator[Stage]:
        return iter(())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))


KERNEL = softmax(12, 40, Role.WHOLE)


def test_the_fastest_correct_configuration_wins_and_wrong_ones_are_named() -> None:
    ((built, tuning),) = Tuner(KernelBuilder(Several()), CPU).build([KERNEL])
    trials = {trial.name: trial for trial in tuning.trials}
    assert tuning.trials[tuning.chosen].name == "right"
    assert built.source.startswith("right\n")
    assert "error" in trials["off"].refused
    assert "NaN" in trials["partial"].refused
    assert "only read" in trials["greedy"].refused
    assert "illegal instruction" in trials["failing"].refused
    assert "shared memory" in trials["unbuilt"].refused
    assert trials["right"].measured is not None and trials["slow"].measured is not None
    assert trials["right"].measured < trials["slow"].measured
    assert "→ right: predicted" in str(tuning) and "off: refused" in str(tuning)


def test_the_winner_is_kept_for_the_next_process() -> None:
    ((_, first),) = Tuner(KernelBuilder(Several()), CPU).build([KERNEL])
    again = Several()
    ((built, second),) = Tuner(KernelBuilder(again), CPU).build([KERNEL])
    assert second == first and again.built == ["right"]  # nothing else was built, so nothing else was timed
    assert built.source.startswith("right\n")


def test_other_configurations_are_measured_anew() -> None:
    Tuner(KernelBuilder(Several()), CPU).build([KERNEL])
    fewer = Several(("slow", "right"))
    Tuner(KernelBuilder(fewer), CPU).build([KERNEL])
    assert sorted(fewer.built) == ["right", "slow"]


def record_of(*refused: str, chosen: object = 0, **fields: object) -> str:
    """The text of a record with a trial for each reason why it was refused."""
    trials = [{"name": "slow", "predicted": 1.0, "measured": 2.0, "refused": reason, **fields} for reason in refused]
    return json.dumps({"subject": "softmax", "trials": trials, "chosen": chosen})


DAMAGED = {
    "incomplete": '{"chosen": 7}',
    "a list": "[]",
    "no trial of that number": record_of("", "", chosen=2),
    "before the first": record_of("", "", chosen=-1),
    "more trials": record_of("", "", ""),
    "fewer trials": record_of(""),
    "a refused winner": record_of("it fails", ""),
    "a winner without a time": record_of("", "", measured=float("nan")),
    "a number beyond all": record_of("", "").replace('"chosen": 0', '"chosen": 1e400'),
    "another field": record_of("", "", more=1),
    "a text for a number": record_of("", "", measured="soon"),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_is_measured_anew(text: str, tmp_path: Path) -> None:
    def built() -> list[str]:
        target = Several(("slow", "right"))
        Tuner(KernelBuilder(target), CPU).build([KERNEL])
        return sorted(target.built)

    assert built() == ["right", "slow"]
    (path,) = (tmp_path / "tuned").iterdir()
    put("tuned", path.name, text.encode())
    assert built() == ["right", "slow"]
    assert built() == ["right"], "the record was replaced"


def test_a_record_of_others_is_measured_anew(tmp_path: Path) -> None:
    Tuner(KernelBuilder(Several(("slow", "right"))), CPU).build([KERNEL])
    (ours,) = (tmp_path / "tuned").iterdir()
    Tuner(KernelBuilder(Several(("right", "slow"))), CPU).build([KERNEL])
    (theirs,) = set((tmp_path / "tuned").iterdir()) - {ours}
    theirs.rename(ours)
    target = Several(("slow", "right"))
    ((built, _),) = Tuner(KernelBuilder(target), CPU).build([KERNEL])
    assert sorted(target.built) == ["right", "slow"] and built.source.startswith("right\n")


def test_a_record_that_cannot_be_kept_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Folder, "rename", full)
    ((_, tuning),) = Tuner(KernelBuilder(Several(("slow", "right"))), CPU).build([KERNEL])
    assert tuning.trials[tuning.chosen].name == "right"


def test_without_a_correct_configuration_the_default_is_kept_and_reported() -> None:
    target = Several(("off", "failing"))
    ((built, tuning),) = Tuner(KernelBuilder(target), CPU).build([KERNEL])
    assert "no configuration" in tuning.reason and built.source == target.emit(KERNEL)


@pytest.mark.parametrize("target", ["c", "reference"])
def test_a_target_without_a_choice_builds_as_always(target: str) -> None:
    builder = KernelBuilder(TARGETS[target]())
    ((built, tuning),) = Tuner(builder, CPU).build([KERNEL])
    assert built is builder.build([KERNEL])[0] and tuning.reason and not tuning.trials


@pytest.mark.parametrize("kernel", [gather(9, 6), flipped(20), KERNEL, matmul(5, 6, 7)], ids=lambda kernel: kernel.name)
def test_inputs_lead_to_no_access_outside_and_are_not_zeros(kernel: Kernel) -> None:
    given, after = expected(kernel, CPU)
    again, _ = expected(kernel, CPU)
    assert wrong(kernel, again, given) is None  # the same each time
    for given_to, tensor, result in zip(kernel.params, given, after, strict=True):
        assert tensor.float().std() > 0.1, given_to.name
        assert torch.equal(tensor, result) is not given_to.written


def test_positions_cover_the_table() -> None:
    given, _ = expected(gather(200, 6), CPU)
    assert set(given[0].tolist()) == {0, 1, 2, 3}


def test_the_users_generator_is_not_touched() -> None:
    before = torch.get_rng_state()
    expected(KERNEL, CPU)
    assert torch.equal(before, torch.get_rng_state())


def test_integers_count_one_by_one() -> None:
    counted = Kernel("counted", (param("out", I64, 1000, written=True),), (), (), ())
    numbers = torch.arange(1000)
    assert wrong(counted, [numbers], [numbers.clone()]) is None
    other = numbers.clone()
    other[5:9] = 0
    assert "0.40%" in str(wrong(counted, [other], [numbers]))


@pytest.mark.parametrize(
    "kernel",
    [matmul(256, 384, 512), matmul(2048, 2048, 256, turned=(False, True)), softmax(64, 5000, Role.WHOLE, F16)],
    ids=["pointers", "descriptors", "rows"],
)
def test_every_triton_alternative_compiles_ahead_of_time(kernel: Kernel) -> None:
    pytest.importorskip("triton")
    target = TARGETS["triton"]("sm_90")
    result = target.alternatives(kernel)
    assert len(result) >= 3 and len({way.name for way in result}) == len(result)
    assert result[0].source == target.emit(kernel)
    for way in result[:6]:
        assert dict(target.stages(kernel, way.source))["cubin"]


def test_sizes_that_are_not_known_keep_the_default() -> None:
    s = sympy.Symbol("s0", integer=True, positive=True)
    kernel = softmax(s, 40, Role.WHOLE)
    with pytest.raises(Unsupported, match="not known"):
        expected(kernel, CPU)
