"""Keeps the measured speeds of devices in the cache directory.

Input: a device's identity and what `fusion calibrate` measured on it; output: the same figures in later processes.  A
file that cannot be read, or that another version wrote, counts as absent: the device then has its assumed speeds.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from fusion.codegen.cache import cache_dir, publish
from fusion.lowering.errors import BuildError

VERSION = 1
"""Changes whenever the figures change their meaning."""


def path_of(identity: str, threads: int = 0) -> Path:
    """Return the file of a device; `threads`: of a CPU, that share its work."""
    name = hashlib.sha256(f"{VERSION} {threads} {identity}".encode()).hexdigest()
    return cache_dir() / "devices" / f"{name}.json"


def keep(figures: dict[str, Any], identity: str, threads: int = 0) -> Path:
    """Write the figures of a device; return their file."""
    path = path_of(identity, threads)
    publish(path, json.dumps(figures, indent=1).encode())
    _read.cache_clear()
    return path


def kept(identity: str, threads: int = 0) -> dict[str, Any] | None:
    """Return the figures that were kept of a device; None if there are none."""
    try:
        return _read(path_of(identity, threads))
    except BuildError:  # no cache directory
        return None


@lru_cache
def _read(path: Path) -> dict[str, Any] | None:
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return figures if isinstance(figures, dict) else None
