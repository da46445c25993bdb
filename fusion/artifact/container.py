"""Packs members into one file, and checks each before it is used.

Input: names and bytes; output: a zip archive of members that are not compressed, the first of which lists the hashes of
the others.  The archive ends with a hash of all that is not in a listed member: of the list, and of the archive's own
tables.  So each bit of the file is covered by a hash.  The hashes detect damage; they say nothing about who wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch

from fusion.artifact.manifest import Manifest
from fusion.artifact.weights import buffer_of, bytes_of
from fusion.lowering.errors import ArtifactError

MANIFEST = "manifest.json"
"""The member that lists the others."""

_SEAL = 64
"""Characters of a hash, at the end of the file."""

_WRITTEN = (1980, 1, 1, 0, 0, 0)
"""The time in all tables: equal programs give equal files."""

Content = Iterable["bytes | memoryview"]


def pack(path: Path, manifest: Mapping[str, object], members: Mapping[str, Content]) -> None:
    """Write an archive: complete, or not at all.

    Raises:
        OSError: the file system refuses.
    """
    with _replacing(path) as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            hashes = {name: _add(archive, name, content) for name, content in members.items()}
            text = json.dumps({**manifest, "members": hashes}, indent=1, ensure_ascii=True).encode()
            _add(archive, MANIFEST, [text])
            archive.comment = b"0" * _SEAL
        with zipfile.ZipFile(file) as archive:
            seal = _seal(file, archive)
        file.seek(-_SEAL, os.SEEK_END)
        file.write(seal)


def _add(archive: zipfile.ZipFile, name: str, content: Content) -> str:
    digest = hashlib.sha256()
    with archive.open(zipfile.ZipInfo(name, _WRITTEN), "w", force_zip64=True) as member:
        for piece in content:
            member.write(piece)
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that takes its place at `path` if nothing fails."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def unpack(path: Path) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Read an archive, and check it.

    Returns:
        The manifest, and the bytes of each member as a tensor of bytes.

    Raises:
        ArtifactError: it is no archive of ours, or a part of it is damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                if archive.comment != _seal(file, archive):
                    raise ArtifactError(_damaged(path, "its tables, or its manifest"))
                places = {info.filename: _place(file, info) for info in archive.infolist()}
            manifest: Manifest = json.loads(bytes(bytes_of(_read(file, places.pop(MANIFEST)))))
            hashes = manifest["members"]
            if hashes.keys() != places.keys():
                raise ArtifactError(_damaged(path, "its list of members"))
            return manifest, {name: _checked(path, file, name, places[name], hashes[name]) for name in hashes}
        except (zipfile.BadZipFile, struct.error, KeyError, ValueError, EOFError, NotImplementedError) as error:
            raise ArtifactError(
                f"{path} is not an artifact of Fusion, or it is damaged: {error}", hint="save the program again"
            ) from error


def content_of(path: Path) -> torch.Tensor:
    """Return the bytes of a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return _read(file, (0, os.fstat(file.fileno()).st_size))


def _damaged(path: Path, part: str) -> str:
    return f"{path} is damaged: {part} is not what was saved; nothing of it was loaded"


def _checked(path: Path, file: IO[bytes], name: str, place: tuple[int, int], expected: str) -> torch.Tensor:
    content = _read(file, place)
    if hashlib.sha256(bytes_of(content)).hexdigest() != expected:
        raise ArtifactError(_damaged(path, f"the member {name}"), hint="copy the file again, or save the program again")
    return content


def _read(file: IO[bytes], place: tuple[int, int]) -> torch.Tensor:
    start, size = place
    content = buffer_of(size)
    file.seek(start)
    if size and file.readinto(bytes_of(content)) != size:  # type: ignore[attr-defined]  # a buffered reader
        raise EOFError("it was cut off")
    return content


def _place(file: IO[bytes], info: zipfile.ZipInfo) -> tuple[int, int]:
    """Return where the bytes of a member begin, and their number."""
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise ValueError("a member is compressed")
    end = file.seek(0, os.SEEK_END)
    if not 0 <= info.header_offset <= end - 30 - info.file_size:
        raise ValueError("a member lies outside")
    file.seek(info.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return info.header_offset + 30 + name + extra, info.file_size


def _seal(file: IO[bytes], archive: zipfile.ZipFile) -> bytes:
    """Return the hash of all bytes outside the members that the manifest lists and the seal itself."""
    digest = hashlib.sha256()
    listed = sorted(_place(file, info) for info in archive.infolist() if info.filename != MANIFEST)
    position = 0
    for start, size in [*listed, (file.seek(0, os.SEEK_END) - _SEAL, 0)]:
        if start < position:
            raise ValueError("members overlap")
        file.seek(position)
        digest.update(file.read(start - position))
        position = start + size
    return digest.hexdigest().encode()


__all__ = ["MANIFEST", "content_of", "pack", "unpack"]
