"""Dumps of processes that share a folder, and of programs in files whose names are no text."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fusion
from fusion.dumps.folders import own_folder

PROGRAM = """
import sys, torch, fusion
def program(x):
    return torch.softmax(x * 3, -1)
fused = fusion.fuse(program, options={"strict": True})
result = fused(torch.arange(12.0).reshape(3, 4))
assert torch.allclose(result, program(torch.arange(12.0).reshape(3, 4)))
(graph,) = fusion.report(fused).graphs
print(ascii(graph.notes), ascii(graph.kernels[0].source))
"""


def in_a_fork(call: Callable[[], object]) -> str:
    """Call a function in a forked process; return the text of its result."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(call()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def ran(path: bytes, **settings: str) -> str:
    """Run a program in a forked process; return what it prints."""

    def run() -> str:
        os.environ.update(settings)
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            runpy.run_path(os.fsdecode(path), run_name="__main__")
        return said.getvalue()

    return in_a_fork(run)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@needs_fork
def test_each_of_several_processes_has_a_folder(tmp_path: Path) -> None:
    root = tmp_path / "dump"
    assert own_folder(root) == own_folder(root) == root
    others = [Path(in_a_fork(lambda: own_folder(root))) for _ in range(2)]
    assert {other.parent for other in others} == {root} and others[0] != others[1]
    assert own_folder(root) == root


@needs_fork
def test_a_later_process_writes_where_an_earlier_one_did(tmp_path: Path) -> None:
    root = tmp_path / "dump"
    assert [in_a_fork(lambda: own_folder(root)) for _ in range(2)] == [str(root)] * 2
    assert own_folder(root) == root


@needs_fork
def test_a_folder_that_was_removed_is_claimed_anew(tmp_path: Path) -> None:
    root = tmp_path / "dump"
    own_folder(root)
    root.rmdir()
    assert own_folder(root) == root and root.is_dir()
    assert in_a_fork(lambda: own_folder(root)) != str(root)


@needs_fork
def test_two_processes_dump_into_one_folder(tmp_path: Path) -> None:
    """The other process runs a program in a file whose name has two lines."""
    torch._dynamo.reset()
    fusion.fuse(lambda x: x.sigmoid(), options={"strict": True, "dump": tmp_path})(torch.ones(3))
    ours = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    program = tmp_path.parent / "caf\xe9 \n#error.py"
    program.write_text(PROGRAM)
    assert r"caf\xe9 \\n#error.py:4" in ran(os.fsencode(program), FUSION_DUMP=str(tmp_path))
    assert all(path.read_bytes() == content for path, content in ours.items())
    (theirs,) = tmp_path.glob("process_*")
    assert [path.name[4:] for path in sorted(theirs.iterdir())] == ["captured", "inference"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems want text")
def test_folders_whose_names_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of programs' files are text: PyTorch compiles no other, for any backend."""
    names = [os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9", name)) for name in (b"cache", b"tmp")]
    os.makedirs(names[1])
    monkeypatch.setenv("FUSION_CACHE_DIR", names[0])
    monkeypatch.setenv("FUSION_GRAPH_CACHE", "1")
    monkeypatch.setenv("TMPDIR", names[1])  # for the C compiler
    monkeypatch.setattr(tempfile, "tempdir", names[1])
    x = torch.arange(12.0).reshape(3, 4)
    notes = []
    for _ in range(2):
        torch._dynamo.reset()
        fused = fusion.fuse(scaled_softmax, options={"strict": True})
        torch.testing.assert_close(fused(x), scaled_softmax(x))
        notes.append(fusion.report(fused).graphs[-1].notes)
    assert notes == [(), ("from the cache",)]


def scaled_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 3.03125, -1)  # no other test has compiled its kernel
