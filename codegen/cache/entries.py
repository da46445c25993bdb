"""Writes and reads the entries of a folder: complete or absent, bound to their names, and not too many.

An entry ends with the hash of its folder, its name and its content.  It is written to a temporary file that is renamed,
so a reader never sees half of it and two writers cannot disturb each other.  It is opened once, so the bytes that were
checked are the bytes returned.  Anything else under its name (a folder, a pipe, a link, another entry, a file of
another user, or a file that others may write) reads as `Damaged`, and is replaced by the next `put`.

How much a folder holds is counted in a file beside it, by a byte for each block stored, so that storing an entry does
not look at all others.  Once the count exceeds `MOST_BYTES`, the folder is read and its least recently used entries are
removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from fusion.codegen.cache.folders import Folder, FolderName, is_own, opened, opened_root, others_write
from fusion.lowering.errors import BuildError

MOST_BYTES = 256 << 20
"""The most bytes that the entries of a folder may take."""

SPARED = 0.75
"""The share of `MOST_BYTES` that remains after entries were removed."""

DISK_BLOCK = 4096
"""Bytes in which a file system stores a file, and by which the files of a folder are counted."""

SEAL_BYTES = 64

Seen: TypeAlias = Callable[[str, str, bytes], object]
"""Called with the folder, the name and the content of an entry."""

_observers: tuple[Seen, ...] = ()

_OWN_NAME = re.compile(r"\.?(fusion_triton_)?[0-9a-f]{32,64}(\..*)?")


class Damaged(Exception):
    """The content of an entry does not match its name."""


def digest(*parts: str | bytes) -> str:
    """Return the sha256 of `parts` as hexadecimal text; the boundaries of parts count.

    >>> digest("ab", "c") == digest("a", "bc")
    False
    """
    state = hashlib.sha256()
    for part in parts:
        # Names of files that are not UTF-8 have surrogates.
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def observe(seen: Seen) -> None:
    """Call `seen` from now on with each entry that any thread of this process stores or reads."""
    global _observers
    _observers = (*_observers, seen)


@contextmanager
def observed(seen: Seen) -> Iterator[None]:
    """Call `seen` with each entry that any thread of this process stores or reads within the context."""
    global _observers
    observe(seen)
    try:
        yield
    finally:
        _observers = tuple(each for each in _observers if each is not seen)


def tell(folder: str, name: str, content: bytes) -> None:
    """Call the observers."""
    for seen in _observers:
        seen(folder, name, content)


def get(folder: FolderName, name: str) -> bytes | None:
    """Return the content of an entry, or None if there is none.

    Raises:
        Damaged: something else has its name.
        BuildError: the folder is refused.
    """
    with opened_root() as root, opened(root, folder, create=False) as at:
        if at is None:
            return None
        try:
            data = _read(at, name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Damaged from error
    content, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    if seal != _seal(folder, name, content):
        raise Damaged
    tell(folder, name, content)
    return content


def put(folder: FolderName, name: str, content: bytes) -> None:
    """Store an entry, and replace anything that has its name.

    Raises:
        BuildError: the folder is refused, or the file system refuses.
    """
    tell(folder, name, content)
    publish(folder, name, content + _seal(folder, name, content))


def publish(folder: FolderName, name: str, data: bytes) -> None:
    """Write a file atomically unless it is there, without a seal: for people and their tools, not to be read back.

    Raises:
        BuildError: the folder is refused, or the file system refuses.
    """
    with opened_root() as root, opened(root, folder, create=True) as at:
        assert at is not None
        with suppress(OSError):
            if _read(at, name) == data:
                return
        try:
            _write(at, name, data)
        except OSError as error:
            raise BuildError(f"cannot write {at.path / name}: {error}", hint="set FUSION_CACHE_DIR") from error
        _count(root, at, folder, name, len(data))


def kept(folder: FolderName) -> list[Path]:
    """Return the files that were stored in a folder; others were put there by somebody else.

    Raises:
        BuildError: the folder is refused.
    """
    with opened_root() as root, opened(root, folder, create=False) as at:
        files = () if at is None else at.path.rglob("*")
        return sorted(path for path in files if _OWN_NAME.fullmatch(path.name) and path.is_file())


def clear(folder: FolderName) -> None:
    """Remove the files that were stored in a folder.

    Raises:
        BuildError: the folder is refused.
    """
    for path in kept(folder):
        path.unlink(missing_ok=True)
    with opened_root() as root:
        root.remove(_count_of(folder))


def _seal(folder: FolderName, name: str, content: bytes) -> bytes:
    return digest(folder, name, content).encode()


def _read(at: Folder, name: str) -> bytes:
    """Read a file of the user that nobody else may write; mark it as used.

    Raises:
        OSError: it is not there, it is something else, or the system refuses.
    """
    descriptor = at.open(name, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        regular = stat.S_ISREG(status.st_mode) and status.st_size <= MOST_BYTES
        if not regular or not is_own(status) or others_write(status):
            raise PermissionError(f"{name} is no file of the user's alone")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read()
        with suppress(OSError):  # a file system that is read only
            os.utime(descriptor if os.utime in os.supports_fd else at.named(name))
        return data
    finally:
        os.close(descriptor)


def _write(at: Folder, name: str, data: bytes) -> None:
    temporary = f".{name}.{secrets.token_hex(4)}"
    descriptor = at.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        try:
            at.rename(temporary, name)
        except IsADirectoryError:
            shutil.rmtree(at.path / name)
            at.rename(temporary, name)
    except BaseException:
        at.remove(temporary)
        raise


def _count_of(folder: FolderName) -> str:
    return f".{folder}.blocks"


def _count(root: Folder, at: Folder, folder: FolderName, newest: str, size: int) -> None:
    """Count a new file; beyond the limit, or where nothing was counted, look at the folder and make room.

    Appending is atomic, so processes share the count.  A file that replaces another is counted again, which only means
    to look earlier.  Without a count (a full disk) nothing is removed.
    """
    with suppress(OSError):
        descriptor = root.open(_count_of(folder), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            counted = os.fstat(descriptor).st_size
            added = _blocks(size)
            os.write(descriptor, bytes(added))
            if counted == 0 or counted + added > _blocks(MOST_BYTES):
                os.ftruncate(descriptor, _make_room(at, newest))
        finally:
            os.close(descriptor)


def _blocks(size: int) -> int:
    return -(-size // DISK_BLOCK)


def _make_room(at: Folder, newest: str) -> int:
    """Remove the least recently used files if all exceed the limit, but not the newest; return the blocks left.

    Another process may do the same at the same time.
    """
    files = sorted((status.st_mtime, _blocks(status.st_size), name) for name, status in at.files())
    total = sum(blocks for _, blocks, _ in files)
    limit = _blocks(MOST_BYTES) if total <= _blocks(MOST_BYTES) else int(_blocks(MOST_BYTES) * SPARED)
    for _, blocks, name in files:
        if total > limit and name != newest:
            total -= blocks
            at.remove(name)
    return total
