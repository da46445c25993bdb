"""The commands on a device: doctor, time, verify and bisect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fusion
from fusion.cli import main
from fusion.codegen.targets import _builders
from fusion.codegen.triton import TritonTarget
from fusion.lowering.ir.kernel import Kernel

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch

def block(x, weight):
    return torch.softmax(torch.relu(x * weight) * 1.640625, dim=-1)
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    path = tmp_path / "block_program.py"
    path.write_text(PROGRAM)
    return [f"{path}:block", "--shape", "64,100", "--shape", "100", "--device", "cuda", "--train"]


def test_the_target_of_the_device_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["GPU"]["found"].startswith(torch.cuda.get_device_name())
    assert checks["target triton"]["found"].startswith("on cuda: 1 kernel compiled, run")


def test_programs_are_timed_and_verified(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 0
    assert "agrees: gradient of input[1]" in capsys.readouterr().out
    assert main(["time", *words, "--rounds", "5", "--mode", "reduce-overhead"]) == 0
    assert "forward and backward; 5 rounds" in capsys.readouterr().out


def test_a_wrong_kernel_is_found(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emit = TritonTarget.emit

    def wrong(self: TritonTarget, kernel: Kernel, *args: object, **kwargs: object) -> str:
        return emit(self, kernel, *args, **kwargs).replace("1.640625", "1.75")  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(TritonTarget, "emit", wrong)
    _builders.clear()
    torch._dynamo.reset()
    try:
        assert main(["bisect", *words, "--option", "graph_cache=no"]) == 1
    finally:
        _builders.clear()
        torch._dynamo.reset()
    assert "other numbers than its block program" in capsys.readouterr().out


def test_a_block_covers_backward_in_the_threads_of_the_device() -> None:
    x = torch.eye(40, device="cuda", requires_grad=True)
    fused = fusion.fuse(lambda x: torch.linalg.matrix_exp(x).sin())
    with pytest.raises(fusion.NotAsRequired, match=r"^backward has \d kernels"), fusion.require(kernels=1):
        fused(x).sum().backward()
