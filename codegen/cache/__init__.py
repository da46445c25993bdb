"""Keeps results for later processes, in a directory that only the user can write, each sealed with its name.

Input: the name of a folder, the name of an entry and bytes; output, in any later process: the same bytes, or nothing.

`folders.py` decides which directory it is and opens its folders: each belongs to the user of this process and is
writable by nobody else.  `entries.py` writes and reads entries below such a folder: complete or absent under concurrent
processes, bound to their names by a seal, and bounded in number of bytes.

The seal detects damage and exchanged files, not malice: whoever may write the user's files can write it, too.  Other
users are kept out by the owner and the mode of every folder and file on the path.
"""

from __future__ import annotations

from fusion.codegen.cache.entries import Damaged, clear, digest, get, kept, observe, observed, publish, put, tell
from fusion.codegen.cache.folders import FOLDERS, FolderName, cache_dir

__all__ = [
    "FOLDERS",
    "Damaged",
    "FolderName",
    "cache_dir",
    "clear",
    "digest",
    "get",
    "kept",
    "observe",
    "observed",
    "publish",
    "put",
    "tell",
]
