"""Triton's binaries on another machine: found there, in an empty cache of Triton's, as if it had compiled them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from fusion.codegen.cache import observed
from fusion.lowering.ir.kernel import Role
from tests.codegen.kernels.rows import softmax

pytest.importorskip("triton")
from triton import knobs

from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.devices import device_of
from fusion.codegen.triton.launch import carried
from fusion.codegen.triton.launch.aot import binary_of

NAME = "0123456789abcdef" * 4
KERNEL = softmax(3, 5, Role.WHOLE)
SOURCE = TritonTarget("sm_90").emit(KERNEL)


def compiled() -> tuple[bytes, list[bool]]:
    """The binary, and for each call of Triton's compiler whether the cache had the result."""
    hits: list[bool] = []
    knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    try:
        return binary_of(KERNEL, SOURCE, device_of("sm_90")).content, hits
    finally:
        knobs.compilation.listener = None


def test_a_carried_binary_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str, bytes]] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "one"))
    with observed(lambda *entry: told.append(entry)):
        first, hits = compiled()
    assert hits == [False]
    ((name, content),) = [entry[1:] for entry in told if entry[0] == carried.FOLDER]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    carried.store(name, content)
    second, hits = compiled()
    assert (second, hits) == (first, [True])


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"../kernel.json": b"{}"}, "names no file"),
        ({"kernel.json": b"{}", "/tmp/kernel.cubin": b""}, "names no file"),
        ({"kernel.json": b"{}", ".hidden": b""}, "names no file"),
        ({"kernel.cubin": b""}, "no metadata"),
        ({"a.json": b"", "b.json": b""}, "no metadata"),
        ({}, "no metadata"),
    ],
)
def test_files_of_other_names_are_refused(files, reason, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    packed = {name: base64.b64encode(content).decode() for name, content in files.items()}
    with pytest.raises(ValueError, match=reason):
        carried.store(NAME, json.dumps(packed).encode())
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "Expecting value"), (b"\xff", "codec"), (b"[]", "no files"), (b'{"kernel.json": 1}', "no files")],
)
def test_what_is_no_entry_is_refused(
    content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=reason):
        carried.store(NAME, content)
    assert not list(tmp_path.rglob("*"))
