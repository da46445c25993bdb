"""The text of a kernel that was generated is what runs, whatever files lie in the cache."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from importlib._bootstrap_external import _code_to_hash_pyc  # type: ignore[import-not-found]
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fusion.codegen.cache.folders import Folder
from fusion.codegen.triton.launch.load import Generated, load
from fusion.lowering.errors import BuildError
from tests.codegen.kernels.pointwise import add
from tests.codegen.triton.texts import TARGET

KERNEL = add(64)
SOURCE = TARGET.emit(KERNEL)
EDITED = SOURCE.replace("def grid(", "def grid(*given):\n    raise ValueError('asked')  # here\n\n\ndef other(")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the texts of this test alone are."""
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    return tmp_path / "triton"


def text_of(generated: Generated) -> str:
    return inspect.getsource(sys.modules[generated.module.__name__])


def test_the_text_is_there_for_triton_and_for_people(files: Path) -> None:
    generated = load(KERNEL, SOURCE)
    assert generated.grid() == 1
    assert text_of(generated) == SOURCE
    assert generated.function.raw_src and "".join(generated.function.raw_src) in SOURCE
    (path,) = files.iterdir()
    assert path.read_text() == SOURCE and path == Path(inspect.getfile(generated.module.grid))


def test_bytecode_beside_the_text_is_neither_read_nor_written(files: Path) -> None:
    load(KERNEL, SOURCE)
    (path,) = files.iterdir()
    wrong = compile(
        SOURCE.replace("def grid(", "def grid(*given):\n    return (77,)\n\n\ndef other("), str(path), "exec"
    )
    bytecode = Path(importlib.util.cache_from_source(str(path)))
    bytecode.parent.mkdir()
    bytecode.write_bytes(_code_to_hash_pyc(wrong, b"12345678", False))
    assert load(KERNEL, SOURCE).grid() == 1
    assert list(bytecode.parent.iterdir()) == [bytecode]


def test_a_text_that_somebody_edited_is_replaced_and_does_not_run(files: Path) -> None:
    generated = load(KERNEL, SOURCE)
    (path,) = files.iterdir()
    path.write_text(EDITED)
    assert text_of(generated) == SOURCE
    again = load(KERNEL, SOURCE)
    assert again.grid() == 1 and text_of(again) == SOURCE
    assert path.read_text() == SOURCE


def test_an_edited_source_runs_as_edited_and_its_lines_are_in_tracebacks(files: Path) -> None:
    generated = load(KERNEL, EDITED)
    for path in files.iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="asked") as raised:
        generated.grid()
    assert "# here" in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("obstruct", [Path.mkdir, os.mkfifo])
def test_anything_else_in_the_place_of_the_text_is_replaced(files: Path, obstruct) -> None:  # type: ignore[no-untyped-def]
    load(KERNEL, SOURCE)
    (path,) = files.iterdir()
    path.unlink()
    obstruct(path)
    assert load(KERNEL, SOURCE).grid() == 1
    assert path.read_text() == SOURCE


def test_a_full_disk(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Folder, "rename", full)
    generated = load(KERNEL, SOURCE)
    assert generated.grid() == 1 and text_of(generated) == SOURCE
    assert list(files.iterdir()) == []


def test_a_text_without_a_grid_is_refused() -> None:
    with pytest.raises(BuildError, match=r"cannot be used(?s:.*)triton"):
        load(KERNEL, SOURCE.replace("def grid(", "def other("))
