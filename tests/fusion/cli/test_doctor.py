"""`fusion doctor` on machines that lack something."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from fusion.cli import doctor, main
from fusion.cli.doctor import ABSENT, FAILS, OK, Check
from fusion.codegen.c import compiler
from fusion.codegen.c.target import CTarget
from fusion.codegen.targets import TARGETS
from fusion.lowering.ir.kernel import Kernel


def checks(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, dict[str, object]]:
    assert main(["doctor", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["works"] is (code == 0)
    return {check["name"]: check for check in found["checks"]}


def test_this_machine_works(capsys: pytest.CaptureFixture[str]) -> None:
    found = checks(capsys, 0)
    assert {f"target {name}" for name in TARGETS} <= found.keys()
    assert [found[name]["state"] for name in ("C compiler", "OpenMP", "cache directory", "target c")] == [OK] * 4
    assert "equal to eager" in str(found["target c"]["found"])
    assert not any(check["remedy"] for check in found.values() if check["state"] == OK)


def test_the_text_has_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ok +target c +on cpu: 1 kernel compiled, run, and equal", shown, re.MULTILINE)
    assert "→" not in shown or not torch.cuda.is_available()


def test_without_a_compiler_the_default_target_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler._compiler.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    found = checks(capsys, 1)
    for name in ("C compiler", "target c"):
        assert found[name]["state"] == FAILS
        assert "no C compiler found (tried no-such-compiler)" in str(found[name]["found"])
        assert "install gcc" in str(found[name]["remedy"])
    assert found["target reference"]["state"] == OK


def test_a_cache_that_cannot_be_written_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^FAILS +cache directory .*\n +→ set FUSION_CACHE_DIR", shown, re.MULTILINE)


def test_wrong_numbers_of_a_target_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    emit = CTarget.emit

    def wrong(self: CTarget, kernel: Kernel) -> str:
        return emit(self, kernel).replace("+=", "-=")

    monkeypatch.setattr(CTarget, "emit", wrong)
    found = checks(capsys, 1)
    assert found["target c"]["state"] == FAILS
    assert "not close" in str(found["target c"]["found"])


def test_old_versions_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    monkeypatch.setattr(doctor, "version", lambda name: "3.5.1")
    found = {check.name: check for check in doctor.examined()}
    assert (found["torch"].state, found["torch"].remedy) == (FAILS, "pip install 'torch>=2.11'")
    assert (found["triton"].state, found["triton"].remedy) == (FAILS, "pip install 'triton>=3.6'")


def test_the_least_versions_are_those_of_the_package() -> None:
    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    for name, least in doctor.OLDEST.items():
        assert f'"{name}>={".".join(map(str, least))}' in text


def test_a_gpu_that_pytorch_cannot_use_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "DEVICE_FILES", (str(tmp_path / "nvidia0"),))
    assert doctor._gpu().state == FAILS and "pytorch.org" in doctor._gpu().remedy
    monkeypatch.setattr(doctor, "DEVICE_FILES", ())
    assert doctor._gpu() == Check("GPU", ABSENT, "PyTorch sees none")
