"""Decides where a process writes its dumps: processes that share `FUSION_DUMP` have separate folders.

Input: the folder that the user named; output: that folder, if no other running process writes there, else a new one
below it.  A process holds a lock on its folder until it ends, so a later run overwrites the dumps of an earlier one.  A
forked process counts as another one.
"""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # see above


@dataclass(frozen=True, slots=True)
class _Claim:
    """The folder of a process, and the descriptor that holds its lock; None if it has no lock."""

    folder: Path
    locked: int | None


_lock = threading.Lock()
_claims: dict[tuple[int, Path], _Claim] = {}


def own_folder(root: Path) -> Path:
    """Return the folder below which this process writes the dumps requested below `root`.

    Raises:
        OSError: it cannot be created.
    """
    key = os.getpid(), root
    with _lock:
        if key in _claims and not _stands(_claims[key], root):
            claim = _claims.pop(key)
            if claim.locked is not None:
                os.close(claim.locked)
        if key not in _claims:
            root.mkdir(parents=True, exist_ok=True)
            _claims[key] = _claimed(root)
        return _claims[key].folder


def _claimed(root: Path) -> _Claim:
    if fcntl is None:
        return _Claim(root, None)
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has it, or the file system has no locks
        os.close(descriptor)
        return _Claim(Path(tempfile.mkdtemp(prefix=f"process_{os.getpid()}_", dir=root)), None)
    return _Claim(root, descriptor)


def _stands(claim: _Claim, root: Path) -> bool:
    """Return whether the claimed folder is still there, and not another of the same name."""
    try:
        return claim.folder.is_dir() and (
            claim.locked is None or os.path.samestat(os.fstat(claim.locked), os.stat(root))
        )
    except OSError:
        return False


__all__ = ["own_folder"]
