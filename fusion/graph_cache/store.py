"""Stores finished compilations as files of the cache directory, each named by the hash of its key.

Input and output are text.  A file is complete or absent (`codegen/cache.py`), begins with the hash of its contents, and
is read only if it belongs to the user of this process.  Beyond the limit the least recently used files are removed.
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
"""The most bytes that the files of a folder may take."""

_SEAL = hashlib.sha256().digest_size


class Damaged(Exception):
    """A file is damaged, or another user's."""


def graphs() -> Path:
    """Return the directory of finished graphs."""
    return cache_dir() / "graphs"


def regions() -> Path:
    """Return the directory of traced regions."""
    return cache_dir() / "regions"


def get(key: str, folder: Callable[[], Path] = graphs) -> str | None:
    """Return the text stored under `key`, or None.

    Raises:
        Damaged: the file is incomplete, or another user's.
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
    with contextlib.suppress(OSError):  # a read-only directory
        os.utime(path)
    return zlib.decompress(packed).decode()


def put(key: str, text: str, folder: Callable[[], Path] = graphs) -> None:
    """Store `text` under `key`, and remove old files of the folder beyond the limit.

    Raises:
        BuildError: the file system refuses.
    """
    packed = zlib.compress(text.encode(), 1)
    path = folder() / key
    publish(path, hashlib.sha256(key.encode() + packed).digest() + packed)
    _make_room(path)


def _make_room(newest: Path) -> None:
    """Remove the least recently used files, but not the newest; another process may do the same at the same time."""
    files: list[tuple[float, int, Path]] = []
    for path in newest.parent.iterdir():
        with contextlib.suppress(OSError):
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total > LIMIT and path != newest:
            total -= size
            with contextlib.suppress(OSError):
                path.unlink()
