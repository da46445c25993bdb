"""Dumped files on a device: kernels, graphs and modules run there, and edited kernels are launched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fusion
from tests.fusion.dumps.programs import programs, run

pytestmark = pytest.mark.gpu


def dumped_on_device(name: str, folder: Path) -> list[Path]:
    """Compile a program on the device with a dump; return the folders of its graphs."""
    torch._dynamo.reset()
    small = programs()[name]
    program = small.program.cuda() if isinstance(small.program, torch.nn.Module) else small.program
    fused = fusion.fuse(program, dynamic=small.dynamic, options={"strict": True, "dump": folder})
    with torch.device("cuda"):
        result = fused(*(each.cuda() for each in small.inputs))
    if small.trains:
        result.square().sum().backward()
    return sorted(path for path in folder.iterdir() if path.name[4:] in ("inference", "forward", "backward"))


@pytest.mark.parametrize("name", programs())
def test_every_file_of_a_dump_runs(name: str, tmp_path: Path) -> None:
    for folder in dumped_on_device(name, tmp_path):
        kernels = sorted(folder.glob("[3-8]?_*.py"))
        assert kernels
        for file in (*kernels, folder / "90_module.py"):
            code, said = run(file)
            assert code == 0 and "  right: " in said and "WRONG" not in said, said
        assert torch.cuda.get_device_name() in run(kernels[0])[1]
        assert run(folder / "00_graph.py")[0] == 0


def test_an_edited_kernel_is_launched(tmp_path: Path) -> None:
    (folder,) = dumped_on_device("half", tmp_path / "dump")
    (file,) = folder.glob("40_*.py")
    (tmp_path / "edited").mkdir()
    edited = tmp_path / "edited" / file.name
    edited.write_text(file.read_text().replace("@triton.jit", "# by hand\n@triton.jit"))
    small = programs()["half"]
    torch._dynamo.reset()
    fused = fusion.fuse(small.program, options={"strict": True, "override": tmp_path / "edited"})
    inputs = [each.cuda() for each in small.inputs]
    torch.testing.assert_close(fused(*inputs), small.program(*inputs), rtol=2e-2, atol=2e-2)
    assert "# by hand" in fusion.report(fused).kernels[0].source
