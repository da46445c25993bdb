"""Gives Triton's binaries to the observers of the cache, and stores them in Triton's cache on another machine.

Input: a compiled kernel, each of whose stages is a file in Triton's cache; output: an entry `binaries/HASH`, where HASH
is Triton's own key of all that decides the binary.  Triton finds the files there as if it had compiled them.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from triton.runtime.cache import get_cache_manager

from fusion.codegen.cache import tell

FOLDER = "binaries"

_FILE = re.compile(r"\w[\w.]*")


def offer(compiled: Any) -> None:
    """Report Triton's `CompiledKernel` to the observers of the cache."""
    try:
        packed = _files(compiled)
    except OSError:  # Triton's cache was emptied since
        return
    tell(FOLDER, compiled.hash, json.dumps(packed).encode())


def _files(compiled: Any) -> dict[str, str]:
    files = {name: Path(path).read_bytes() for name, path in compiled.metadata_group.items()}
    return {name: base64.b64encode(content).decode() for name, content in sorted(files.items())}


def pack(*compiled: Any) -> bytes:
    """Return Triton's `CompiledKernel`s as `unpack` takes them.

    Raises:
        OSError: Triton's cache was emptied since.
    """
    return json.dumps({each.hash: _files(each) for each in compiled}).encode()


def unpack(content: bytes) -> None:
    """Store the text that `pack` returned in Triton's cache.

    Raises:
        ValueError: it returns no such thing.
        OSError: the file system refuses.
    """
    packed = json.loads(content)
    if not isinstance(packed, dict) or not all(_FILE.fullmatch(name) for name in packed):
        raise ValueError("it holds no binaries of Triton")
    for name, files in packed.items():
        store(name, json.dumps(files).encode())


def store(name: str, content: bytes) -> None:
    """Store the files of an entry in Triton's cache, in place of those with the same names.

    Raises:
        ValueError: it is no such entry.
        OSError: the file system refuses.
    """
    packed = json.loads(content)
    if not isinstance(packed, dict) or not all(isinstance(each, str) for each in packed.values()):
        raise ValueError("it holds no files")
    if wrong := [file for file in packed if not _FILE.fullmatch(file)]:
        raise ValueError(f"{wrong[0]!r} names no file of a kernel")
    heads = [file for file in packed if file.endswith(".json")]
    if len(heads) != 1:
        raise ValueError("it has no metadata")
    manager = get_cache_manager(name)
    paths = {file: manager.put(base64.b64decode(each), file) for file, each in packed.items()}
    manager.put_group(heads[0], paths)


__all__ = ["FOLDER", "offer", "pack", "store", "unpack"]
