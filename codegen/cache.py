"""Manages the cache directory: content-addressed, private to the user, safe under concurrent processes.

Input: a path below `cache_dir()` and bytes; output: a file that is either complete or absent: it is written to a
temporary file and renamed, so a reader never sees half of it and two writers of the same content cannot disturb each
other.  A directory of another user is refused, because its contents are loaded and run; write permission of others is
removed.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fusion.lowering.errors import BuildError


def cache_dir() -> Path:
    """Return the cache directory: `$FUSION_CACHE_DIR`, else `$XDG_CACHE_HOME/fusion`, else `~/.cache/fusion`.

    If none is chosen and the home directory is not writable, as is common in containers, it is `fusion-` with the
    user's number in the directory of temporary files.  It is created with mode 0700.

    Raises:
        BuildError: it cannot be created, or it belongs to another user.
    """
    chosen = os.environ.get("FUSION_CACHE_DIR")
    if chosen:
        return _private(Path(chosen).expanduser())
    try:
        base = os.environ.get("XDG_CACHE_HOME")
        usual = _private((Path(base) if base else Path.home() / ".cache") / "fusion")
        if os.access(usual, os.W_OK):
            return usual
    except (BuildError, RuntimeError):  # the latter: there is no home
        pass
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    return _private(Path(tempfile.gettempdir()) / f"fusion-{user}")


def _private(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise BuildError(f"the cache directory {path} cannot be used: {error}", hint="set FUSION_CACHE_DIR") from error
    if not (is_own(status) and is_own(path.lstat())):  # nor may a link of another user lead there
        raise BuildError(
            f"the cache directory {path} belongs to another user", hint="set FUSION_CACHE_DIR to a directory of yours"
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        path.chmod(0o700)
    return path


FOLDERS: Mapping[str, str] = {
    "c": "kernels of the C target",
    "triton": "kernels of the Triton target",
    "tuned": "measurements",
    "graphs": "finished graphs",
    "regions": "traced regions",
    "devices": "measured speeds of devices",
}
"""The folders of the cache directory → their contents."""

_OWN_NAME = re.compile(r"\.?(fusion_triton_)?[0-9a-f]{32,64}(\..*)?")


def kept(folder: str) -> list[Path]:
    """Return the files that were published in a folder of the cache directory, and their compiled Python files.

    Files with other names were put there by somebody else, and are left out.
    """
    files = (cache_dir() / folder).rglob("*")
    return sorted(path for path in files if _OWN_NAME.fullmatch(path.name) and path.is_file())


def is_own(status: os.stat_result) -> bool:
    """Return whether a file belongs to the user of this process, as far as the system tells."""
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def digest(*parts: str | bytes) -> str:
    """Return the sha256 of `parts` as hexadecimal text; the boundaries of parts count.

    >>> digest("ab", "c") == digest("a", "bc")
    False
    """
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def publish(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically; readers see all of it or the previous content.

    Raises:
        BuildError: the file system refuses.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise BuildError(f"cannot write {path}: {error}", hint="set FUSION_CACHE_DIR") from error
