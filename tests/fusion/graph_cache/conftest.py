"""A cache of graphs for each test alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone, in use; only the C compiler's objects are the session's."""
    objects = Path(os.environ["FUSION_CACHE_DIR"], "c")
    objects.mkdir(exist_ok=True)
    (tmp_path / "c").symlink_to(objects, target_is_directory=True)
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FUSION_GRAPH_CACHE", "1")
    return tmp_path / "graphs"
