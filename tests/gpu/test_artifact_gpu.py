"""Programs that are saved for a GPU are loaded by another process, on empty caches, and Triton compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import fusion

pytestmark = pytest.mark.gpu

LOAD = """
import sys
import torch
import fusion
from triton import knobs

misses = []
knobs.compilation.listener = lambda **told: misses.append(told["cache_hit"])
path, inputs, results = sys.argv[1:]
artifact = fusion.load(path)
found = [artifact(*given) for given in torch.load(inputs)]
torch.cuda.synchronize()
torch.save(found, results)
print(len(misses), misses.count(False), len(artifact.manifest["kernels"]))
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.nn.functional.gelu(self.inner(self.norm(x))))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-1, -2)).float() / 8, -1).to(v.dtype) @ v


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


ROWS = ({0: Dim("rows", max=1 << 16)},)


@pytest.mark.parametrize("case", ["block", "rows", "attention"])
@pytest.mark.parametrize("made", ["here", "ahead"])
def test_another_process_loads_it_and_compiles_nothing(case: str, made: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = attention if case == "attention" else Block().eval().bfloat16().cuda()
    calls = {
        "block": [(drawn(96, 128),)],
        "rows": [(drawn(96, 128),), (drawn(64, 128),), (drawn(1, 128),), (drawn(1000, 128),)],
        "attention": [(drawn(2, 4, 256, 64), drawn(2, 4, 256, 64), drawn(2, 4, 256, 64))],
    }[case]
    path, inputs, results = (str(tmp_path / name) for name in ("model.fusion", "inputs.pt", "results.pt"))
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    settings = {"dynamic_shapes": ROWS} if case == "rows" else {}
    if made == "here":
        fusion.save(program, path, inputs=calls[0], **settings)
    else:
        saved = program.cpu() if isinstance(program, nn.Module) else program
        given = tuple(each.cpu() for each in calls[0])
        fusion.save(saved, path, inputs=given, device="cuda", arch=arch, **settings)
        program = program.cuda() if isinstance(program, nn.Module) else program
    torch.save(calls, inputs)
    folders = {"FUSION_CACHE_DIR": str(tmp_path / "f"), "TRITON_CACHE_DIR": str(tmp_path / "t")}
    command = [sys.executable, "-c", LOAD, path, inputs, results]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **folders})
    assert done.returncode == 0, done.stderr
    asked, compiled, kernels = map(int, done.stdout.split())
    assert asked >= kernels > 0 and compiled == 0
    for given, found in zip(calls, torch.load(results), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(found, program(*given), rtol=2e-2, atol=3e-2)


def test_tensors_that_are_not_aligned_are_served(tmp_path: Path) -> None:
    """Triton compiles a binary without alignments, from the source in the file."""
    program = torch.nn.LayerNorm(64).half().cuda().eval()
    fusion.save(program, tmp_path / "model.fusion", inputs=(torch.randn(32, 64, device="cuda").half(),))
    artifact = fusion.load(tmp_path / "model.fusion")
    x = torch.randn(32 * 64 + 1, device="cuda").half()[1:].view(32, 64)
    with torch.no_grad():
        torch.testing.assert_close(artifact(x), program(x), rtol=1e-2, atol=1e-2)


def test_weights_are_on_the_device_and_can_be_replaced(tmp_path: Path) -> None:
    program = nn.Linear(64, 32).cuda().eval()
    fusion.save(program, tmp_path / "model.fusion", inputs=(torch.randn(8, 64, device="cuda"),))
    artifact = fusion.load(tmp_path / "model.fusion")
    assert {weight.device.type for weight in artifact.state_dict().values()} == {"cuda"}
    other = nn.Linear(64, 32).cuda()
    artifact.load_state_dict(other.state_dict())
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(artifact(x), other(x), rtol=1e-4, atol=1e-4)
