"""Programs for a GPU are saved without one, with all that Triton needs so as to compile nothing at a load."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import fusion
from fusion.artifact import load as loading
from fusion.artifact.container import unpack
from fusion.artifact.weights import bytes_of
from fusion.codegen.binary import loader_of


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.GELU(), nn.LayerNorm(64)).half()


def text(members: Any, name: str) -> str:
    return bytes(bytes_of(members[name])).decode()


def test_a_program_for_a_gpu_is_saved_without_one(tmp_path: Path) -> None:
    path = tmp_path / "model.fusion"
    fusion.save(normed(), path, inputs=(torch.randn(8, 64).half(),), device="cuda", arch="sm_90")
    manifest, members = unpack(path)
    assert manifest["device"] == "cuda" and manifest["architectures"] == {"sm_90": ["cuda", "sm_90"]}
    (kernel,) = manifest["kernels"]
    assert bytes(bytes_of(members[kernel["objects"]["sm_90"]])).startswith(b"\x7fELF")
    assert "@triton.jit" in text(members, kernel["source"]) and kernel["launch"]["num_warps"] > 0
    with zipfile.ZipFile(path) as archive:
        assert "empty_cuda" in {step.get("function") for step in json.loads(archive.read("steps.json"))}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_it_is_refused_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.fusion"
    fusion.save(normed(), path, inputs=(torch.randn(8, 64).half(),), device="cuda", arch="sm_90")
    with pytest.raises(fusion.ArtifactError, match="saved for a GPU, and PyTorch sees none"):
        fusion.load(path)
    assert loader_of("triton").lacking(["cuda", "sm_90"]) == ("cuda", "sm_90")
    monkeypatch.setattr(loading, "_differences", lambda manifest: [])
    with pytest.raises(fusion.ArtifactError, match=r"sm_90 needs cuda, sm_90; and they cannot be compiled here"):
        fusion.load(path)
