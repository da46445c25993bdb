"""Machines, versions and targets that differ from those that a program was saved with."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusion
from fusion.artifact.container import pack, unpack
from fusion.artifact.weights import bytes_of
from fusion.codegen.c import stored
from tests.fusion.artifact.saving import assert_like_eager, saved

X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86-64")


def program(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1) * 2


def rewritten(path: Path, **changes: Any) -> None:
    """Write a file anew with other entries in its manifest."""
    manifest, members = unpack(path)
    del manifest["members"]
    pack(path, {**manifest, **changes}, {name: [bytes_of(each)] for name, each in members.items()})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fusion.save(program, tmp_path / "program.fusion", inputs=(torch.randn(4, 9),))
    return tmp_path / "program.fusion"


def test_another_cpu_compiles_from_source(path: Path) -> None:
    rewritten(path, architectures={"native": [platform.machine(), "avx1024"]})
    with pytest.warns(fusion.FusionWarning, match="native needs avx1024; compiled again from source"):
        artifact = fusion.load(path)
    assert len(artifact.notes) == 1
    assert_like_eager(program, artifact, (torch.randn(4, 9),))


def test_another_machine_without_a_compiler_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten(path, architectures={"native": ["vax", "VMS"]})
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(fusion.ArtifactError, match=r"native needs vax, VMS; and they cannot be compiled here"):
        fusion.load(path)


def test_an_object_that_the_system_does_not_load_is_compiled_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> object:
        raise OSError("version `GLIBC_9.9' not found")

    monkeypatch.setattr(stored._Objects, "load", refused)
    with pytest.warns(fusion.FusionWarning, match=r"GLIBC_9\.9' not found; compiled again from source"):
        assert_like_eager(program, fusion.load(path), (torch.randn(4, 9),))


def test_another_version_of_pytorch_with_the_same_operations(path: Path) -> None:
    rewritten(path, torch="1.0")
    with pytest.warns(fusion.FusionWarning, match="saved with PyTorch 1.0, loaded with"):
        artifact = fusion.load(path)
    assert_like_eager(program, artifact, (torch.randn(4, 9),))


def test_another_version_of_pytorch_with_other_operations(path: Path) -> None:
    for changed in ({"aten.mm.default": "aten::mm(Tensor other) -> Tensor"}, {"aten.no_such.default": "aten::x()"}):
        rewritten(path, torch="1.0", operations=changed)
        with pytest.raises(fusion.ArtifactError, match=r"saved with PyTorch 1\.0.* there is no aten\."):
            fusion.load(path)


def test_another_target_is_refused(path: Path) -> None:
    rewritten(path, target="reference", architectures={"sm_90": ["cuda", "sm_90"]})
    with pytest.raises(fusion.FusionError, match="reference target"):
        fusion.load(path)


@X86
def test_several_architectures_are_in_one_file(tmp_path: Path) -> None:
    artifact = saved(program, tmp_path, torch.randn(4, 9), arch=("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4"))
    assert artifact.notes == ()
    assert [*artifact.manifest["architectures"]] == ["x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4"]
    assert "avx512f" in artifact.manifest["architectures"]["x86-64-v4"]
    assert_like_eager(program, artifact, (torch.randn(4, 9),))


@X86
@pytest.mark.parametrize("present", ["x86-64", "x86-64-v2"])
def test_the_object_with_the_most_features_that_are_there_is_loaded(
    present: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(program, tmp_path, torch.randn(4, 9), arch=["x86-64", "x86-64-v2", "x86-64-v4"])
    manifest, members = unpack(tmp_path / "program.fusion")
    (kernel,) = manifest["kernels"]
    monkeypatch.setattr(stored, "features", lambda: frozenset(manifest["architectures"][present]) - {"x86_64", "Linux"})
    loaded: list[bytes] = []
    real = stored.launcher_of
    monkeypatch.setattr(stored, "launcher_of", lambda content, *rest: loaded.append(content) or real(content, *rest))
    assert_like_eager(program, fusion.load(tmp_path / "program.fusion"), (torch.randn(4, 9),))
    assert loaded == [bytes(bytes_of(members[kernel["objects"][present]]))]
    two, three = np.longdouble(2), np.longdouble(3)  # of x87, which gives NaN after MMX instructions
    assert two * three == np.longdouble(6)


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fusion.Unsupported, match="does not build for 'pdp-11'"):
        saved(program, tmp_path, torch.randn(4, 9), arch="pdp-11")
