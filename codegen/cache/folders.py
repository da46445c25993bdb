"""Decides which directory is the cache, and opens its folders.

Input: the environment and the name of a folder; output: the folder, held open, so that its files are opened relative to
the folder that was checked and not to a path that may lead elsewhere by then.  A folder is created with mode 0700, as
are the parents that it lacks.  One of another user, or that a link of another user leads to, is refused: its contents
are loaded and run.  Write permission of others is removed.
"""

from __future__ import annotations

import getpass
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from fusion.lowering.errors import BuildError

FolderName: TypeAlias = Literal["c", "triton", "tuned", "graphs", "regions", "devices"]

FOLDERS: Mapping[FolderName, str] = {
    "c": "kernels of the C target",
    "triton": "kernels of the Triton target",
    "tuned": "measurements",
    "graphs": "finished graphs",
    "regions": "traced regions",
    "devices": "measured speeds of devices",
}
"""The folders of the cache directory → their contents."""

_RELATIVE = os.open in os.supports_dir_fd
"""Whether the system opens files relative to an open folder; Windows does not."""


@dataclass(frozen=True, slots=True)
class Folder:
    """An open folder; `descriptor` is None where the system has none for folders, and paths take its place."""

    path: Path
    descriptor: int | None

    def named(self, name: str) -> str:
        """Return how a system call names a file of the folder, beside `dir_fd=descriptor`."""
        return name if self.descriptor is not None else str(self.path / name)

    def open(self, name: str, flags: int) -> int:
        """Open a file without following a link or waiting for a writer; a new one is the user's alone.

        Raises:
            OSError: the system refuses.
        """
        for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
            flags |= getattr(os, flag, 0)
        return os.open(self.named(name), flags, 0o600, dir_fd=self.descriptor)

    def rename(self, name: str, to: str) -> None:
        """Rename a file atomically, replacing a file that has the new name.

        Raises:
            OSError: the system refuses.
        """
        os.replace(self.named(name), self.named(to), src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there and can be removed."""
        with suppress(OSError):
            os.unlink(self.named(name), dir_fd=self.descriptor)

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the name and status of each regular file."""
        with os.scandir(self.path if self.descriptor is None else self.descriptor) as files:
            for each in files:
                with suppress(OSError):  # another process has removed it
                    status = each.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield each.name, status


def cache_dir() -> Path:
    """Return the cache directory: `$FUSION_CACHE_DIR`, else `$XDG_CACHE_HOME/fusion`, else `~/.cache/fusion`.

    If none is chosen and the home directory is not writable, as is common in containers, it is `fusion-` with the
    user's number in the directory of temporary files.

    Raises:
        BuildError: it cannot be created, or it belongs to another user.
    """
    with opened_root() as root:
        return root.path


@contextmanager
def opened_root() -> Iterator[Folder]:
    """Open the cache directory for the time of the context.

    Raises:
        BuildError: it cannot be created, or it belongs to another user.
    """
    root = _open_root()
    try:
        yield root
    finally:
        _close(root)


@contextmanager
def opened(root: Folder, name: FolderName, *, create: bool) -> Iterator[Folder | None]:
    """Open a folder of the cache directory for the time of the context: None if it is not there and not to be created.

    Raises:
        BuildError: it cannot be created or opened, or it belongs to another user.
    """
    folder = _open(root.path / name, root, create=create)
    try:
        yield folder
    finally:
        if folder is not None:
            _close(folder)


def is_own(status: os.stat_result) -> bool:
    """Return whether a file belongs to the user of this process, as far as the system tells."""
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def others_write(status: os.stat_result) -> bool:
    """Return whether other users may write a file, as far as the system tells."""
    return hasattr(os, "getuid") and bool(stat.S_IMODE(status.st_mode) & 0o022)


def _open_root() -> Folder:
    chosen = os.environ.get("FUSION_CACHE_DIR")
    if chosen:
        return _opened_or_created(Path(chosen).expanduser())
    try:
        base = os.environ.get("XDG_CACHE_HOME")
        usual = _opened_or_created((Path(base) if base else Path.home() / ".cache") / "fusion")
        if os.access(usual.path, os.W_OK):
            return usual
        _close(usual)
    except (BuildError, RuntimeError):  # the latter: there is no home
        pass
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    return _opened_or_created(Path(tempfile.gettempdir()) / f"fusion-{user}")


def _opened_or_created(path: Path) -> Folder:
    folder = _open(path, None, create=True)
    assert folder is not None
    return folder


def _open(path: Path, parent: Folder | None, *, create: bool) -> Folder | None:
    """Open a folder, `path.name` of `parent` if that is given."""
    name = str(path) if parent is None else parent.named(path.name)
    at = None if parent is None else parent.descriptor
    descriptor: int | None = None
    try:
        try:
            descriptor = _descriptor(name, at)
        except FileNotFoundError:
            if not create:
                return None
            _make(path, name, at)
            descriptor = _descriptor(name, at)
        link = os.stat(name, dir_fd=at, follow_symlinks=False)
        status = os.stat(name) if descriptor is None else os.fstat(descriptor)
        if not (is_own(status) and is_own(link)):
            hint = "set FUSION_CACHE_DIR to a directory of yours"
            raise BuildError(f"the cache directory {path} belongs to another user", hint=hint)
        if others_write(status):
            os.chmod(name if descriptor is None else descriptor, 0o700)
        return Folder(path, descriptor)
    except BaseException as error:
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(error, OSError):
            hint = "set FUSION_CACHE_DIR"
            raise BuildError(f"the cache directory {path} cannot be used: {error}", hint=hint) from error
        raise


def _descriptor(name: str, at: int | None) -> int | None:
    if _RELATIVE:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
    os.stat(name)
    return None


def _make(path: Path, name: str, at: int | None) -> None:
    """Create a folder with its missing parents, each for the user alone."""
    if at is None:
        for each in reversed(path.parents):
            if not each.exists():
                with suppress(FileExistsError):  # another process was faster
                    each.mkdir(0o700)
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=at)


def _close(folder: Folder) -> None:
    if folder.descriptor is not None:
        os.close(folder.descriptor)
