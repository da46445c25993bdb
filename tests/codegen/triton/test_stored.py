"""What a saved program holds of Triton's binaries: Triton finds them on another machine, and compiles nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

pytest.importorskip("triton")

from triton import knobs

import fusion
from fusion.artifact.container import unpack
from fusion.artifact.kernels import kernel_of
from fusion.artifact.weights import bytes_of
from fusion.codegen.triton.devices import device_of
from fusion.codegen.triton.launch import carried
from fusion.codegen.triton.launch.aot import compile_for
from fusion.codegen.triton.launch.load import load
from fusion.codegen.triton.launch.multiples import sizes_that_matter


def text(members: Any, name: str) -> str:
    return bytes(bytes_of(members[name])).decode()


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x * 3, -1)


@pytest.mark.parametrize("sizes", [None, ({0: Dim("rows", max=1 << 20), 1: Dim("columns", max=1 << 12)},)])
def test_triton_compiles_nothing_of_what_a_file_holds(
    sizes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the machine that loads it: the kernel is read, and what Triton compiled is put into an empty cache."""
    path = tmp_path / "model.fusion"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "one"))
    fusion.save(softmax, path, inputs=(torch.randn(64, 48),), device="cuda", arch="sm_90", dynamic_shapes=sizes)
    manifest, members = unpack(path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    hits: list[bool] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **told: hits.append(told["cache_hit"]))
    for entry in manifest["kernels"]:
        carried.unpack(text(members, entry["carried"]["sm_90"]).encode())
        kernel = kernel_of(text(members, entry["kernel"]))
        generated, relevant = load(kernel, text(members, entry["source"])), sizes_that_matter(kernel)
        ways = {tuple(False for _ in relevant), tuple(relevant)}  # of sizes that are multiples of 16, or not
        assert len(ways) == (1 if sizes is None else 2)
        for multiples in ways:
            assert compile_for(generated, device_of("sm_90"), multiples).asm["cubin"].startswith(b"\x7fELF")
    assert hits and all(hits)


@pytest.mark.parametrize("content", [b"[]", b'{"../x": {}}', b'{"name": {"kernel.cubin": ""}}'])
def test_a_file_with_other_binaries_is_refused(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"holds no|no metadata"):
        carried.unpack(content)
    assert not list(tmp_path.rglob("*"))
