"""Stores finished compilations as compressed text in the cache directory, each named by the hash of its key."""

from __future__ import annotations

import zlib

from fusion.codegen import cache
from fusion.codegen.cache import FolderName


def get(key: str, folder: FolderName = "graphs") -> str | None:
    """Return the text stored under `key`, or None.

    Raises:
        Damaged: something else has that name.
        BuildError: the folder is refused.
    """
    packed = cache.get(folder, key)
    return None if packed is None else zlib.decompress(packed).decode()


def put(key: str, text: str, folder: FolderName = "graphs") -> None:
    """Store `text` under `key`.

    Raises:
        BuildError: the folder is refused, or the file system refuses.
    """
    cache.put(folder, key, zlib.compress(text.encode(), 1))
