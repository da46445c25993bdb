"""Programs in C++ that link no PyTorch run exported models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import fusion
from tests.fusion.artifact.standalone.test_programs import convolutional, mlp

ROOT = Path(__file__).resolve().parents[4]
EXAMPLE = ROOT / "examples/standalone"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def done(*command: object, env: dict[str, str] | None = None) -> str:
    finished = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=env)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def built(folder: Path, program: str = "apply", *flags: str) -> Path:
    """Build a program for the library in a folder."""
    command = ("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", *flags, f"-I{folder}")
    place = (Path(__file__).with_name(f"{program}.cpp"), folder / "libmodel.so", f"-Wl,-rpath,{folder}")
    done(*command, *place, "-o", folder / program)
    return folder / program


def built_alone(folder: Path) -> Path:
    """Build `apply.cpp`, and see what it needs."""
    built(folder)
    needed = done("ldd", folder / "apply")
    assert "libmodel.so" in needed and not any(name in needed for name in ("torch", "python", "libc10"))
    return folder / "apply"


@pytest.mark.parametrize(
    ("program", "x", "others"),
    [
        (mlp(), torch.randn(4, 24), [torch.randn(33, 24)]),
        (convolutional(), torch.randn(4, 3, 17, 18), [torch.randn(2, 3, 17, 18)]),
        (lambda x: (x - x.amax(-1, keepdim=True)).exp().sum(-1), torch.randn(5, 91), [torch.randn(700, 91)]),
    ],
    ids=["mlp", "convolutions", "reduction"],
)
def test_a_program_in_cplusplus(
    program: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, others: Sequence[torch.Tensor], tmp_path: Path
) -> None:
    shapes = ({0: Dim("rows", max=1024)},)
    fusion.export_library(program, tmp_path / "libmodel.so", inputs=(x,), dynamic_shapes=shapes)
    apply = built_alone(tmp_path)
    for given in (x, *others):
        (tmp_path / "x.bin").write_bytes(given.numpy().tobytes())
        done(apply, 3, tmp_path / "y.bin", "x".join(map(str, given.shape)), tmp_path / "x.bin")
        found = torch.frombuffer(bytearray((tmp_path / "y.bin").read_bytes()), dtype=torch.float32)
        with torch.no_grad():
            expected = program(given)
        torch.testing.assert_close(found.view(expected.shape), expected, rtol=2e-4, atol=2e-4)


def test_an_error_reaches_the_program(tmp_path: Path) -> None:
    fusion.export_library(nn.Linear(3, 2).eval(), tmp_path / "libmodel.so", inputs=(torch.ones(4, 3),))
    apply = built_alone(tmp_path)
    (tmp_path / "x.bin").write_bytes(bytes(4 * 5 * 3))
    finished = subprocess.run(
        [apply, "1", "y.bin", "5x3", tmp_path / "x.bin"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 1
    assert finished.stderr == "input has shape [5, 3], and the program is for [4, 3]\n"


def test_nothing_outside_of_memory_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sanitizers of GCC watch runs in threads, and damaged files of weights."""
    sanitizers = "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"
    probe = subprocess.run(
        ["g++", *sanitizers, "-x", "c++", "-", "-o", tmp_path / "probe"], input=b"int main() {}", check=False
    )
    if probe.returncode != 0:
        pytest.skip("GCC has no sanitizers here")
    monkeypatch.setenv("CC", " ".join(("gcc", *sanitizers)))
    x = torch.randn(3, 3, 17, 18)
    fusion.export_library(convolutional(), tmp_path / "libmodel.so", inputs=(x,))
    (tmp_path / "x.bin").write_bytes(x.numpy().tobytes())
    done(built(tmp_path, "apply", *sanitizers), 3, tmp_path / "y.bin", "3x3x17x18", tmp_path / "x.bin")
    files = tmp_path / "model.safetensors", tmp_path / "damaged.safetensors"
    opened, refused = map(int, done(built(tmp_path, "damage", *sanitizers), *files, 500).split())
    assert opened + refused == 500 and refused > 400


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_the_example_prints_the_tokens_of_eager(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    prompt = "12", "5", "17", "200"
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT)}
    expected = done(sys.executable, EXAMPLE / "export_gpt2.py", tmp_path / "gpt2", *prompt, env=surroundings)
    done("cmake", "-S", EXAMPLE, "-B", tmp_path / "build", f"-DMODEL={tmp_path / 'gpt2'}")
    done("cmake", "--build", tmp_path / "build")
    assert done(tmp_path / "build/greedy", *prompt) == expected
    assert len({*expected.split()}) > 6
