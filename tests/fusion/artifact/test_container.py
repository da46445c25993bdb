"""Files: each bit is covered by a hash, and nothing of a damaged one is loaded."""

from __future__ import annotations

import ctypes
import json
import random
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import fusion
from fusion.artifact.container import pack, unpack
from fusion.artifact.weights import bytes_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A saved program with kernels, weights and a literal."""
    path = tmp_path / "model.fusion"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4))
    fusion.save(lambda x: model(x) * torch.tensor([1.0, 2, 3, 4]), path, inputs=(torch.zeros(3, dtype=torch.int64),))
    return path


def forbid_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> object:
        raise AssertionError("an object was loaded")

    monkeypatch.setattr(ctypes, "CDLL", refused)


def test_a_flipped_bit_is_refused_before_anything_is_loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = path.read_bytes()
    forbid_loading(monkeypatch)
    with zipfile.ZipFile(path) as archive:
        starts = [info.header_offset + 30 + len(info.filename) + 20 for info in archive.infolist()]
        assert len(starts) >= 7
    drawn = random.Random(0).sample(range(len(whole)), 400)
    tables = range(len(whole) - 400, len(whole))
    for place in [*starts, *drawn, *tables]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        with pytest.raises(fusion.ArtifactError, match=r"damaged"):
            fusion.load(path)


@pytest.mark.parametrize("change", ["cut off", "longer", "empty", "another file", "a folder"])
def test_other_files_are_refused(change: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = path.read_bytes()
    forbid_loading(monkeypatch)
    if change == "a folder":
        path.unlink()
        path.mkdir()
        with pytest.raises(OSError, match="directory"):
            fusion.load(path)
        return
    path.write_bytes({"cut off": whole[:-1000], "longer": whole + b"x", "empty": b""}.get(change, b"PK" * 1000))
    with pytest.raises(fusion.ArtifactError, match=r"not an artifact|damaged"):
        fusion.load(path)


def test_a_member_that_is_exchanged_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = path.with_name("other")
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(other, "w") as copy:
        for info in archive.infolist():
            content = archive.read(info)
            copy.writestr(info, content.replace(b"embedding", b"gnidbedme") if "sources" in info.filename else content)
        copy.comment = archive.comment
    forbid_loading(monkeypatch)
    with pytest.raises(fusion.ArtifactError, match="damaged"):
        fusion.load(other)


def test_another_format_is_refused(path: Path) -> None:
    manifest, members = unpack(path)
    del manifest["members"]
    pack(path, {**manifest, "format": 2, "fusion": "9.0"}, {name: [bytes_of(each)] for name, each in members.items()})
    with pytest.raises(fusion.ArtifactError, match=r"the format 2 of Fusion 9\.0, and this is Fusion"):
        fusion.load(path)


@pytest.mark.parametrize(
    "step",
    [
        {"function": "os.system", "args": ["true"], "result": 5},
        {"function": "builtins.eval", "args": ["1"], "result": 5},
        {"operation": "aten.__class__.__init__", "args": [], "result": 5},
        {"operation": "os.system", "args": [], "result": 5},
        {"size": "__import__('os').getpid()", "args": [], "result": 5},
        {"kernel": 99, "args": [], "result": 5},
    ],
)
def test_steps_call_only_what_is_listed(step: object, path: Path) -> None:
    manifest, members = unpack(path)
    del manifest["members"]
    changed = {name: [bytes_of(each)] for name, each in members.items()}
    changed["steps.json"] = [json.dumps([step]).encode()]
    pack(path, manifest, changed)
    with pytest.raises(fusion.ArtifactError, match="malformed"):
        fusion.load(path)


def test_nothing_is_unpickled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> object:
        raise AssertionError("it was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", refused)
    assert fusion.load(path)(torch.tensor([1, 2, 3])).shape == (3, 4)


def test_a_file_that_cannot_be_written_leaves_the_old_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    monkeypatch.setattr("fusion.artifact.container._seal", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fusion.save(lambda x: x + 1, path, inputs=(torch.ones(3),))
    assert path.read_bytes() == before and [*path.parent.iterdir()] == [path]
