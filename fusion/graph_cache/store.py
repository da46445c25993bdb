"""Store: finished compilations as files of the cache directory, each named by the hash of its key.

What enters and leaves is text.  A file is complete or absent (`codegen/cache.py`), begins with the hash of what
follows, and is read only if it belongs to the user of this process.  Where all together exceed the limit, those that
nobody has asked for longest are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable
from pathlib import Path

from fusion.codegen.cache import cache_dir, is_own, publish

LIMIT = 256 << 20
"""Bytes that all files of a folder may take."""

_SEAL = hashlib.sha256().digest_size


class Damaged(Exception):
    """A file is not what was written."""


def graphs() -> Path:
    """Where finished graphs lie."""
    return cache_dir() / "graphs"


def regions() -> Path:
    """Where traced regions lie."""
    return cache_dir() / "regions"


def get(key: str, folder: Callable[[], Path] = graphs) -> str | None:
    """What was kept under `key`; None where nothing was.

    Raises:
        Damaged: the file is not whole, or another user's.
    """
    path = folder() / key
    try:
        content = path.read_bytes()
        own = is_own(path.stat())
    except OSError:
        return None
    seal, packed = content[:_SEAL], content[_SEAL:]
    if not own or hashlib.sha256(key.encode() + packed).digest() != seal:
        raise Damaged
    with contextlib.suppress(OSError):  # a directory that can only be read
        os.utime(path)
    return zlib.decompress(packed).decode()


def put(key: str, text: str, folder: Callable[[], Path] = graphs) -> None:
    """Keep `text` under `key`, and make room in the folder.

    Raises:
        BuildError: the file system refuses.
    """
    packed = zlib.compress(text.encode(), 1)
    path = folder() / key
    publish(path, hashlib.sha256(key.encode() + packed).digest() + packed)
    _make_room(path)


def _make_room(newest: Path) -> None:
    """Remove what was asked for longest ago, but not the newest; another process may do the same meanwhile."""
    found: list[tuple[float, int, Path]] = []
    for path in newest.parent.iterdir():
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total > LIMIT and path != newest:
            total -= size
            with contextlib.suppress(OSError):
                path.unlink()
