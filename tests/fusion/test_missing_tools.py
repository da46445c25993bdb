"""Machines without a compiler, Triton, or a writable directory: programs run eagerly, with a hint."""

from __future__ import annotations

import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils import _triton

import fusion
from fusion.codegen import cache
from fusion.codegen.c import build, compiler
from fusion.codegen.cache.folders import Folder
from fusion.codegen.targets import builder_for
from fusion.dumps import trace

X = torch.linspace(-1, 2, 12).view(3, 4)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "cache"))


def fresh() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a program without kernels built in this process."""
    number = fresh.number = getattr(fresh, "number", 0) + 1
    return lambda x: torch.softmax(x, -1) * 1.5 + number


def assert_eager_with_warning(reason: str, hint: str, **options: object) -> None:
    program = fresh()
    fused = fusion.fuse(program, options=options)
    with pytest.warns(fusion.FusionWarning, match=rf"(?s)running eagerly: \w+: {reason}.*hint: .*{hint}"):
        got = fused(X)
    assert torch.equal(got, program(X))
    assert not fusion.report(fused).kernels


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler._compiler.cache_clear()
    monkeypatch.delenv("CC", raising=False)
    with monkeypatch.context() as nowhere:
        nowhere.setenv("PATH", str(tmp_path))
        assert_eager_with_warning(r"no C compiler found \(tried cc, gcc, clang\)", "install gcc")
    with monkeypatch.context() as misspelt:
        misspelt.setenv("CC", "gccc")
        assert_eager_with_warning(r"no C compiler found \(tried gccc\)", r"\$CC")


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make importing Triton fail, and PyTorch check again whether it can be imported."""
    known = (_triton.has_triton_package, _triton.has_triton)
    with monkeypatch.context() as without:
        for name in list(sys.modules):
            if name.startswith(("triton", "fusion.codegen.triton")):
                without.delitem(sys.modules, name)
        without.setitem(sys.modules, "triton", None)
        for each in known:
            each.cache_clear()
        yield
    for each in known:
        each.cache_clear()


def test_no_triton(no_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusion.codegen.targets._builders", {})
    assert_eager_with_warning("the triton target cannot be used", "install the package triton", target="triton")


def test_no_target_for_a_device() -> None:
    with pytest.raises(fusion.FusionError, match=r"(?s)for 'meta' tensors.*supported devices: cpu, cuda"):
        builder_for("meta")


def test_no_directory_for_built_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert_eager_with_warning("the cache directory .* cannot be used", "FUSION_CACHE_DIR")


def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("FUSION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = fresh()
    torch.testing.assert_close(fusion.fuse(program, options={"strict": True})(X), program(X))
    (result,) = tmp_path.glob("fusion-*/c/*.so")
    assert cache.cache_dir() == result.parent.parent
    assert stat.S_IMODE(cache.cache_dir().stat().st_mode) == 0o700


def test_a_directory_of_another_user(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    (tmp_path / "cache").mkdir(mode=0o700)
    os.chown(tmp_path / "cache", 12345, -1)
    assert_eager_with_warning("the cache directory .* belongs to another user", "FUSION_CACHE_DIR")


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Folder, "rename", full)
    monkeypatch.setattr("fusion.codegen.targets._builders", {})
    program = fresh()
    fused = fusion.fuse(program, options={"strict": True})
    torch.testing.assert_close(fused(X), program(X))
    (report,) = fusion.report(fused).graphs
    assert report.kernels
    assert any(re.fullmatch("built kernels are not kept: .*No space left on device", note) for note in report.notes)


def test_no_execution_in_memory_and_in_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(build, "bind_openmp", lambda: None)
    monkeypatch.setattr(build.ctypes, "CDLL", refused)
    assert_eager_with_warning("kernel .* cannot be loaded", "TMPDIR has to lie where files may be executed")


def test_no_place_for_dumps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(self: Path, data: bytes) -> None:
        raise OSError(28, os.strerror(28))

    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"dump must be a directory, and .* is a file"):
        fusion.fuse(torch.relu, options={"dump": tmp_path / "file"})
    monkeypatch.setattr(trace.Path, "write_bytes", refused)
    program = fresh()
    fused = fusion.fuse(program, options={"strict": True, "dump": tmp_path / "a dump"})
    said = r"no more is dumped: .* cannot be written: No space left.*FUSION_DUMP"
    with pytest.warns(fusion.FusionWarning, match=said) as warned:
        torch.testing.assert_close(fused(X), program(X))
    assert len(warned) == 1 and fusion.report(fused).kernels
