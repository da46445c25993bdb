"""The directory of built things: content-addressed, private to the user, safe under concurrent processes.

Input: a path below `cache_dir()` and bytes; output: a file that is either complete or absent: it is written beside its
place and moved there in one step, so a reader never sees half of it and two writers of the same content cannot disturb
each other.  A directory of another user is refused, because what lies in it is loaded and run; one of one's own that
others could write to is closed to them.
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
    """Where built things are kept: `$FUSION_CACHE_DIR`, else `$XDG_CACHE_HOME/fusion`, else `~/.cache/fusion`.

    Where nobody chose the directory and the home does not let itself be written, as that of a container's user often
    does not, it is `fusion-` and the user's number in the directory of temporary files.  It is made with mode 0700.

    Raises:
        BuildError: it cannot be made, or it belongs to somebody else.
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
    if not (is_own(status) and is_own(path.lstat())):  # nor may a link lead there that somebody else has laid
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
}
"""The folders of the cache directory, and what lies in each."""

_OWN_NAME = re.compile(r"\.?(fusion_triton_)?[0-9a-f]{32,64}(\..*)?")


def kept(folder: str) -> list[Path]:
    """The files that were published in a folder of the cache directory, and what Python has made of them.

    A file of another name was put there by somebody else, and is none of them.
    """
    found = (cache_dir() / folder).rglob("*")
    return sorted(path for path in found if _OWN_NAME.fullmatch(path.name) and path.is_file())


def is_own(status: os.stat_result) -> bool:
    """Does a file belong to the user of this process, as far as the system tells?"""
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def digest(*parts: str | bytes) -> str:
    """The sha256 of `parts` as hexadecimal text; where one part ends and the next begins counts.

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
    """Put `content` at `path` in one step; whoever reads `path` sees all of it or what was there before.

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
