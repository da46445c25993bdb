"""Hands entries of the cache to other machines, by `torch.compiler.save_cache_artifacts` and `load_cache_artifacts`.

Each entry that a compilation stores or reads is recorded with PyTorch as an artifact of the type `fusion`: regions,
graphs, objects, measurements, and Triton's binaries.  `load_cache_artifacts` stores them in this user's cache, sealed
anew, and compilations find them there as entries of an earlier process.  The key of an entry covers the machine,
the tools and the versions, so that entries of another kind of machine are never read.

Names are checked, contents are not: objects among them are machine code.  Whoever loads artifacts trusts their author
(SECURITY.md).
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import cast

from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from fusion.codegen.cache import FolderName, observe, put
from fusion.lowering.errors import BuildError, FusionWarning

TYPE = "fusion"
"""The type of the artifacts, by which `CacheInfo.artifacts` lists their keys."""

_NAMES: Mapping[str, re.Pattern[str]] = {
    "c": re.compile(r"[0-9a-f]{64}\.so"),
    "graphs": re.compile(r"[0-9a-f]{64}"),
    "regions": re.compile(r"[0-9a-f]{64}"),
    "tuned": re.compile(r"[0-9a-f]{64}\.json"),
    "binaries": re.compile(r"[0-9a-f]{64}"),
}
"""The folders whose entries are carried to other machines, and the names that entries have there."""


@CacheArtifactFactory.register
class FusionArtifact(CacheArtifact):
    """One entry: its key is `folder/name`, its content is compressed."""

    @staticmethod
    def type() -> str:
        """Return the type, under which PyTorch finds this class again."""
        return TYPE

    def populate_cache(self) -> None:
        """Store the entry in this user's cache; warn if it is none, or cannot be stored."""
        folder, _, name = self.key.partition("/")
        try:
            store(folder, name, zlib.decompress(self.content))
        except (BuildError, OSError, ValueError, zlib.error) as error:
            message = f"an artifact of the cache was not loaded: {self.key}: {error}"
            warnings.warn(message, FusionWarning, stacklevel=2)


def carried(folder: str, name: str) -> bool:
    """Return whether that is the name of an entry that other machines may use."""
    return folder in _NAMES and _NAMES[folder].fullmatch(name) is not None


def store(folder: str, name: str, content: bytes) -> None:
    """Store an entry from another machine in this user's cache; a binary in Triton's, where there is a Triton.

    Raises:
        ValueError: it is not the name of such an entry, or its content is none.
        BuildError: the folder is refused, or the file system refuses; for Triton's cache an OSError.
    """
    if not carried(folder, name):
        raise ValueError("it is no entry of the cache")
    if folder != "binaries":
        put(cast("FolderName", folder), name, content)
    elif find_spec("triton") is not None:
        from fusion.codegen.triton.launch.carried import store as store_binary

        store_binary(name, content)


def _record(folder: str, name: str, content: bytes) -> None:
    if carried(folder, name):
        CacheArtifactManager.record_artifact(TYPE, f"{folder}/{name}", zlib.compress(content, 1))


@cache
def take_part() -> None:
    """Record entries with PyTorch from now on."""
    observe(_record)


__all__ = ["TYPE", "FusionArtifact", "carried", "store", "take_part"]
