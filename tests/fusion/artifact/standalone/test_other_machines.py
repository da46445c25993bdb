"""Libraries for other machines: compiled for AArch64 on Linux and macOS, and run under QEMU where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fusion
from tests.fusion.artifact.standalone.calling import CODES
from tests.fusion.artifact.standalone.test_programs import Attention, convolutional, mlp
from tests.zig import clang

GLIBC = "aarch64-linux-gnu.2.36"
SYSTEM = os.environ.get("QEMU_LD_PREFIX", "/usr/aarch64-linux-gnu")
QEMU = next(filter(None, map(shutil.which, ("qemu-aarch64-static", "qemu-aarch64"))), None)
RUNS = QEMU is not None and Path(SYSTEM, "lib/ld-linux-aarch64.so.1").exists()

PROGRAMS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "mlp": (mlp(), torch.randn(5, 24)),
    "half": (mlp().half(), torch.randn(5, 24).half()),
    "bfloat16": (mlp().bfloat16(), torch.randn(5, 24).bfloat16()),
    "convolutions": (convolutional(), torch.randn(3, 3, 17, 18)),
    "attention": (Attention().eval(), torch.randn(1, 300, 32)),
    "extremes": (lambda x: x.amax(1) + x.argmax(1), torch.cat([torch.randn(9, 70), torch.full((2, 70), -1e30)])),
    "functions": (lambda x: F.gelu(x).tanh() + x.exp().log1p() + torch.fmod(x, 0.3), torch.randn(3, 101)),
    "integers": (lambda x: (x * 100).round().to(torch.int32) // 7 % 5, torch.randn(4, 33)),
}


def exported(name: str, folder: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Export a program for a machine, and return the library."""
    program, x = PROGRAMS[name]
    monkeypatch.setenv("CC", clang(folder / "clang", target))
    fusion.export_library(program, folder / "libmodel.so", inputs=(x,))
    monkeypatch.delenv("CC")
    return folder / "libmodel.so"


@pytest.mark.parametrize("name", PROGRAMS)
def test_aarch64_on_linux(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = exported(name, tmp_path, GLIBC, monkeypatch)
    head = library.read_bytes()[:20]
    assert head[:4] == b"\x7fELF" and int.from_bytes(head[18:20], "little") == 183  # EM_AARCH64
    if not RUNS:
        return
    program, x = PROGRAMS[name]
    source = Path(__file__).with_name("apply.cpp")
    place = f"-I{tmp_path}", str(source), str(library), f"-Wl,-rpath,{tmp_path}", "-o", str(tmp_path / "apply")
    subprocess.run([clang(tmp_path / "clang", GLIBC, "c++"), "-std=c++17", "-O1", *place], check=True)
    (tmp_path / "x.bin").write_bytes(x.view(torch.uint8).numpy().tobytes())
    files = str(tmp_path / "y.bin"), "x".join(map(str, x.shape)), str(tmp_path / "x.bin")
    command = [str(QEMU), "-L", SYSTEM, str(tmp_path / "apply"), "2", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = program(x)
    assert expected.dtype in CODES
    found = torch.frombuffer(bytearray((tmp_path / "y.bin").read_bytes()), dtype=expected.dtype).view(expected.shape)
    tolerance = 2e-2 if expected.dtype.itemsize == 2 else 2e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["mlp", "half", "attention"])
def test_aarch64_on_macos(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = exported(name, tmp_path, "aarch64-macos", monkeypatch)
    head = library.read_bytes()[:8]
    assert head == bytes.fromhex("cffaedfe0c000001")  # Mach-O of 64 bits, ARM64


def test_windows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fusion.Unsupported, match="kernels in C are not built for Windows"):
        exported("mlp", tmp_path, "x86_64-windows-gnu", monkeypatch)
