"""Dumped kernels in Triton, under the interpreter: their files and modules run, and edited ones are launched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fusion
from tests.fusion.dumps.programs import dumped, programs, run


@pytest.mark.parametrize("name", programs())
def test_every_file_of_a_dump_runs(name: str, tmp_path: Path) -> None:
    for folder in dumped(name, tmp_path, target="triton"):
        kernels = sorted(folder.glob("[3-8]?_*.py"))
        assert kernels
        for file in (*kernels, folder / "90_module.py"):
            code, said = run(file)
            assert code == 0 and "  right: " in said and "WRONG" not in said, said


def test_a_wrong_kernel_is_found(tmp_path: Path) -> None:
    (folder,) = dumped("scan", tmp_path, target="triton")
    (file,) = folder.glob("40_*.py")
    text = file.read_text()
    assert "running_sum0, 3.0" in text
    file.write_text(text.replace("running_sum0, 3.0", "running_sum0, 3.1"))
    assert run(file)[0] == run(folder / "90_module.py")[0] == 1


def test_an_edited_kernel_is_launched(tmp_path: Path) -> None:
    small = programs()["lambda"]
    (folder,) = dumped("lambda", tmp_path / "dump", target="triton")
    (file,) = folder.glob("40_*.py")
    text = file.read_text()
    (tmp_path / "edited").mkdir()
    (tmp_path / "edited" / file.name).write_text(text.replace("@triton.jit", "# by hand\n@triton.jit"))
    torch._dynamo.reset()
    options = {"strict": True, "target": "triton", "override": tmp_path / "edited"}
    edited = fusion.fuse(small.program, options=options)
    torch.testing.assert_close(edited(*small.inputs), small.program(*small.inputs))
    assert "# by hand" in fusion.report(edited).kernels[0].source
