"""Launches in a row are one step of a saved program, and one call where it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.artifact import load as loading
from fusion.artifact.container import unpack
from fusion.artifact.weights import bytes_of
from fusion.runtime import sequence_calls
from tests.fusion.artifact.saving import assert_like_eager
from tests.fusion.artifact.test_other_machines import X86, rewritten


def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Several kernels: reductions along both axes, one after the other."""
    a = torch.softmax(x, -1)
    b = F.layer_norm(a * a.sum(0), a.shape[-1:])
    c = b.sigmoid().cumsum(0)
    return (c * w.sigmoid()).sum(-1), a


def looked_up(x: Tensor, at: Tensor, w: Tensor) -> Tensor:
    """Reads rows that two kernels compute, and fails for an index out of range."""
    rows = torch.softmax(x, -1)
    rows = rows / rows.sum(0)
    return (rows[at] * w).sum(-1)


INPUTS = torch.randn(37, 50), torch.randn(50)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fusion.save(program, tmp_path / "program.fusion", inputs=INPUTS)
    return tmp_path / "program.fusion"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many kernels each call of C has launched."""
    counts: list[int] = []
    real = sequence_calls.launched_in_sequence

    def counted(entries: Any, places: Any, function: Any) -> Any:
        launch = real(entries, places, function)

        def launched(*given: Any) -> Any:
            counts.append(len(entries))
            return launch(*given)

        return launched

    monkeypatch.setattr(sequence_calls, "launched_in_sequence", counted)
    return counts


def steps_of(path: Path) -> list[dict[str, Any]]:
    _, members = unpack(path)
    steps: list[dict[str, Any]] = json.loads(bytes(bytes_of(members[loading.STEPS])))
    return steps


def test_launches_in_a_row_are_one_step(path: Path, calls: list[int]) -> None:
    steps = steps_of(path)
    (sequence,) = [step["sequence"] for step in steps if "sequence" in step]
    launches = sequence["launches"]
    assert len(launches) > 2 and not any("kernel" in step for step in steps)
    parts = [place for launch in launches for place in launch["places"] if not isinstance(place, int)]
    assert parts and all(part["begin"] < sequence["workspace"] for part in parts)
    assert_like_eager(program, fusion.load(path), INPUTS)
    assert calls == [len(launches)]


def test_without_the_function_launches_are_called_one_by_one(path: Path, calls: list[int]) -> None:
    rewritten(path, sequences=None)
    artifact = fusion.load(path)
    assert_like_eager(program, artifact, INPUTS)
    assert not calls and not artifact.notes


def test_another_machine_compiles_the_function_too(path: Path, calls: list[int]) -> None:
    rewritten(path, architectures={"native": ["vax"]})
    with pytest.warns(fusion.FusionWarning, match="native needs vax; compiled again from source"):
        artifact = fusion.load(path)
    assert_like_eager(program, artifact, INPUTS)
    assert len(calls) == 1


@X86
def test_each_architecture_has_its_object(tmp_path: Path, calls: list[int]) -> None:
    fusion.save(program, tmp_path / "program.fusion", inputs=INPUTS, arch=["x86-64", "native"])
    manifest, members = unpack(tmp_path / "program.fusion")
    objects = manifest["sequences"]["objects"]
    assert objects.keys() == {"x86-64", "native"} and members.keys() >= {*objects.values()}
    assert_like_eager(program, fusion.load(tmp_path / "program.fusion"), INPUTS)
    assert len(calls) == 1


@pytest.mark.parametrize("together", [True, False])
def test_a_failed_check_names_the_line(tmp_path: Path, together: bool) -> None:
    inputs = torch.randn(9, 20), torch.tensor([1, 8, 3]), torch.randn(20)
    fusion.save(looked_up, tmp_path / "program.fusion", inputs=inputs)
    assert any("sequence" in step for step in steps_of(tmp_path / "program.fusion"))
    if not together:
        rewritten(tmp_path / "program.fusion", sequences=None)
    artifact = fusion.load(tmp_path / "program.fusion")
    assert_like_eager(looked_up, artifact, inputs)
    with pytest.raises(IndexError, match=r"(?s)index 9 .*test_sequences\.py"):
        artifact(inputs[0], torch.tensor([1, 9, 3]), inputs[2])


def test_kernels_of_symbolic_sizes_are_launched_one_by_one(tmp_path: Path, calls: list[int]) -> None:
    rows = {0: torch.export.Dim("rows", min=2, max=4096)}
    fusion.save(program, tmp_path / "program.fusion", inputs=INPUTS, dynamic_shapes=(rows, None))
    assert not any("sequence" in step for step in steps_of(tmp_path / "program.fusion"))
    artifact = fusion.load(tmp_path / "program.fusion")
    assert_like_eager(program, artifact, (torch.randn(11, 50), INPUTS[1]))
    assert not calls
