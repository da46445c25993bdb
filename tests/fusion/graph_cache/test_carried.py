"""Entries travel with PyTorch's cache artifacts, and are found in another user's empty cache."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.compiler._cache import CacheArtifactManager

from fusion.codegen.cache import get, kept, put
from fusion.graph_cache.carried import TYPE, FusionArtifact
from fusion.lowering.errors import FusionWarning
from tests.fusion.graph_cache.starts import fresh, no_tracing, notes, started

NAME = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def recording() -> Iterator[None]:
    """PyTorch records the artifacts of this test alone."""
    with CacheArtifactManager.with_fresh_cache():
        yield


def saved() -> bytes:
    result = torch.compiler.save_cache_artifacts()
    assert result is not None
    data, info = result
    assert info.artifacts[TYPE]
    return data


def another_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "another").mkdir()
    monkeypatch.setenv("FUSION_CACHE_DIR", str(folder / "another"))


def norm_and_product(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.gelu(nn.functional.layer_norm(x, x.shape[-1:]) @ w)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_an_empty_cache_has_the_compilations_of_another(gradients, dynamic, tmp_path, monkeypatch):
    given = torch.randn(5, 12, requires_grad=gradients), torch.randn(12, 7, requires_grad=gradients)
    first, cold = started(norm_and_product, *map(fresh, given), dynamic=dynamic)
    data = saved()
    another_cache(tmp_path, monkeypatch)
    info = torch.compiler.load_cache_artifacts(data)
    assert info is not None and {key.split("/")[0] for key in info.artifacts[TYPE]} >= {"graphs", "regions"}
    no_tracing(monkeypatch)
    second, warm = started(norm_and_product, *map(fresh, given), dynamic=dynamic)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    assert [graph.notes[-1] for graph in warm.graphs] == ["from the cache"] * len(cold.graphs)
    assert all(graph.kernels for graph in warm.graphs)


def test_a_process_that_found_its_entries_hands_them_on(tmp_path, monkeypatch):
    x, w = torch.randn(5, 12), torch.randn(12, 7)
    started(norm_and_product, x, w)
    with CacheArtifactManager.with_fresh_cache():
        assert "from the cache" in notes(started(norm_and_product, x, w)[1])
        data = saved()
    another_cache(tmp_path, monkeypatch)
    torch.compiler.load_cache_artifacts(data)
    assert "from the cache" in notes(started(norm_and_product, x, w)[1])


LOADS = """
import sys
import zlib
import torch
import fusion.codegen.c.build
import fusion.compilation.compile
from fusion.backend import fusion_backend

def fail(*args, **kwargs):
    raise AssertionError("compiled again")

fusion.codegen.c.build._compile = fusion.compilation.compile.schedule_graph = fail
program = torch.compile(lambda x: (x * 1.375 + 0.625).relu().sum(-1), backend=fusion_backend)
assert torch.compiler.load_cache_artifacts(open(sys.argv[1], "rb").read()) is not None
print(program(torch.ones(3, 40)).tolist())
"""


def test_a_new_process_on_an_empty_cache_compiles_nothing(tmp_path, monkeypatch):
    """The program is on the command line of both processes, and its lines are part of its key."""
    data = tmp_path / "artifacts"
    saves = LOADS.replace("fusion.codegen.c.build._compile = fusion.compilation.compile.schedule_graph = fail\n", "\n")
    saves = saves.replace('assert torch.compiler.load_cache_artifacts(open(sys.argv[1], "rb").read()) is not None', "")
    saves += 'open(sys.argv[1], "wb").write(torch.compiler.save_cache_artifacts()[0])\n'
    monkeypatch.setenv("FUSION_STRICT", "1")
    printed = []
    for number, source in enumerate((saves, LOADS)):
        monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / f"cache{number}"))
        done = subprocess.run(
            [sys.executable, "-c", source, str(data)], capture_output=True, text=True, check=False, env=dict(os.environ)
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed == ["[80.0, 80.0, 80.0]\n"] * 2


def test_an_entry_is_stored_as_this_users(tmp_path, monkeypatch):
    put("graphs", NAME, b"content")
    data = saved()
    another_cache(tmp_path, monkeypatch)
    torch.compiler.load_cache_artifacts(data)
    assert get("graphs", NAME) == b"content"
    (file,) = kept("graphs")
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "key", [f"c/../{NAME}", f"../c/{NAME}", "graphs/..", f"devices/{NAME}", f"graphs/{NAME}.so", "c/", NAME, ""]
)
def test_other_names_are_refused(key, tmp_path, monkeypatch):
    another_cache(tmp_path, monkeypatch)
    with pytest.warns(FusionWarning, match="is no entry of the cache"):
        FusionArtifact(key, zlib.compress(b"content")).populate_cache()
    assert not [path for path in (tmp_path / "another").rglob("*") if path.is_file()]


def test_damaged_contents_are_refused(tmp_path, monkeypatch):
    another_cache(tmp_path, monkeypatch)
    with pytest.warns(FusionWarning, match=f"graphs/{NAME}: "):
        FusionArtifact(f"graphs/{NAME}", b"content").populate_cache()
    assert get("graphs", NAME) is None


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    put("graphs", NAME, b"content")
    data = saved()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(FusionWarning, match="cannot be used"):
        torch.compiler.load_cache_artifacts(data)
