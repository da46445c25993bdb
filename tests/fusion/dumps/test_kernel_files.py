"""The files of dumped kernels: they run, their checks can fail, and what they hold can be read back."""

from __future__ import annotations

import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import fusion
from fusion.dumps.kernel_files import Unreadable, read_kernel_file
from tests.fusion.dumps.programs import dumped, programs, run, run_alone

TRITON_PROGRAM = """
import torch, fusion
x = torch.randn(6, 33)
def program(x):
    return torch.dropout(torch.softmax(x, -1), 0.5, True)
fused = fusion.fuse(program, options={"strict": True, "target": "triton"})
assert fused(x).shape == x.shape
"""


def kernels(folders: list[Path]) -> list[Path]:
    """Return the files of kernels."""
    return [path for folder in folders for path in sorted(folder.glob("[3-8]?_*.py"))]


@pytest.mark.parametrize("name", programs())
def test_every_kernel_of_a_dump_runs_and_is_right(name: str, tmp_path: Path) -> None:
    files = kernels(dumped(name, tmp_path))
    assert files
    for file in files:
        code, said = run(file)
        assert code == 0 and "  right: " in said and "WRONG" not in said, said
        assert re.search(r"µs a launch: \d+\.\d+ GB/s, \d+\.\d+ GFLOP/s; \d+% of the roof, at which it takes \d", said)


@pytest.mark.slow
def test_the_files_run_as_programs(tmp_path: Path) -> None:
    for file in kernels(dumped("model", tmp_path)):
        done = run_alone(file)
        assert done.returncode == 0 and "right: out0" in done.stdout, done.stdout + done.stderr


def test_a_wrong_kernel_is_found(tmp_path: Path) -> None:
    (file,) = kernels(dumped("lambda", tmp_path))
    text = file.read_text()
    wrong = text.replace("* 2.0f", "* 2.01f")
    assert wrong != text
    file.write_text(wrong)
    code, said = run(file)
    assert code == 1 and re.search(r"WRONG: out0: error \d\.\de-0[234] against float64", said), said


def test_a_source_that_cannot_be_built_ends_with_the_message_of_the_compiler(tmp_path: Path) -> None:
    (file,) = kernels(dumped("lambda", tmp_path))
    file.write_text(file.read_text().replace("* 2.0f", "* "))
    with pytest.raises(SystemExit, match=r"the source cannot be built: the C compiler .* failed"):
        runpy.run_path(str(file), run_name="__main__")


def test_elements_that_are_not_written_are_found(tmp_path: Path) -> None:
    (file,) = kernels(dumped("changed", tmp_path))
    text = file.read_text()
    fewer = re.sub(r"< 198;", "< 190;", text)
    assert fewer != text
    file.write_text(fewer)
    assert run(file)[0] == 1


def test_positions_stay_within_their_bounds(tmp_path: Path) -> None:
    (file,) = kernels(dumped("gather", tmp_path))
    assert re.search(r"draw\.integers\(\(6, 4\), \(4, 1\), torch\.int64, \S+, 32\)", file.read_text())


def test_divisors_are_not_zero(tmp_path: Path) -> None:
    (file,) = kernels(dumped("integers", tmp_path))
    assert "torch.int64, 1, 100)" in file.read_text()


def test_origins_are_in_the_file(tmp_path: Path) -> None:
    text = "".join(file.read_text() for file in kernels(dumped("model", tmp_path)))
    assert re.search(r"// gelu \(\w*, ?programs\.py:\d+\)|// gelu \(programs\.py:\d+\)", text), text


def test_a_file_gives_back_its_kernel_and_source(tmp_path: Path) -> None:
    torch._dynamo.reset()
    fused = fusion.fuse(lambda x: x.exp() * 2, options={"strict": True, "dump": tmp_path})
    fused(torch.ones(7))
    (file,) = tmp_path.rglob("40_*.py")
    read = read_kernel_file(file)
    (report,) = fusion.report(fused).kernels
    assert read.source.strip() == report.source.strip() and read.target == "c" and not read.is_edited
    file.write_text(file.read_text().replace("* 2.0f", "* 3.0f"))
    assert read_kernel_file(file).is_edited


DAMAGE = [("KERNEL = (\n    '", "KERNEL = (\n    '!"), ("ORIGINAL", "ORIGIN"), ("SIZES", "if")]


@pytest.mark.parametrize("change", DAMAGE)
def test_a_damaged_file_is_refused(change: tuple[str, str], tmp_path: Path) -> None:
    (file,) = kernels(dumped("lambda", tmp_path))
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(Unreadable, match="cannot be read as the file of a kernel"):
        read_kernel_file(file)


def test_the_reference_target_runs_too(tmp_path: Path) -> None:
    (file,) = kernels(dumped("lambda", tmp_path, target="reference"))
    assert run(file)[0] == 0


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_files_of_triton_run_without_a_device(tmp_path: Path) -> None:
    """Dumped by a program under Triton's interpreter; run without its variable."""
    program = tmp_path / "program.py"
    program.write_text(TRITON_PROGRAM)
    done = run_alone(program, TRITON_INTERPRET="1", FUSION_DUMP=str(tmp_path / "dump"))
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("dump/*/4?_*.py"))
    assert files
    for file in files:
        done = run_alone(file, TRITON_INTERPRET="", CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0 and "right: out0" in done.stdout, done.stdout + done.stderr
        assert "Triton's interpreter" in done.stdout
