"""Loads shared objects from bytes that were checked, and unloads them with their last function.

Input: the bytes of an object; output: a library.  The bytes are copied to memory that has a descriptor, and loaded from
there: no file can be exchanged in between, none has to be where files may be executed, and a full disk does not matter.
Where the system has no such memory, or does not load from it, a private temporary file takes its place.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

try:
    from _ctypes import dlclose
except ImportError:  # Windows
    from _ctypes import FreeLibrary as dlclose  # type: ignore[attr-defined,no-redef]  # noqa: N813  # see above

DEBUGGED = b".debug_info"
"""Part of an object that the compiler writes symbols to, by `-g` in `$CC`."""

ELF_HEADER = struct.Struct("<40xQ10xHH2x")
"""The header of an object for 64 bits, of which it reads where the table of sections begins, and its entries' size and
number.
"""

_numbers = itertools.count()


def load(binary: bytes, name: str) -> ctypes.CDLL:
    """Load a shared object, until the library and all functions of it are released.

    Args:
        name: for tools that list the libraries of a process.

    Raises:
        OSError: it is no object or the start of one, or it may not be loaded from memory nor from the directory of
            temporary files.
    """
    if not is_complete(binary):
        raise OSError(f"the object of {name} was cut off")
    refusal: OSError | None = None
    for placed in (_in_memory, _in_temporary_file):
        with ExitStack() as place:
            try:
                library = ctypes.CDLL(place.enter_context(placed(binary, name)))
            except OSError as error:
                refusal = refusal or error
            else:
                # Debuggers and sanitizers read symbols where an object was loaded from.
                kept = place.pop_all() if DEBUGGED in binary else ExitStack()
                # At exit threads may still run its functions.
                weakref.finalize(library, _unload, library._handle, kept).atexit = False
                return library
    assert refusal is not None
    raise refusal


def is_complete(binary: bytes) -> bool:
    """Return whether the sections of an ELF object are all there; a loader dies of a page that is missing.

    The table of sections is the last part that linkers write.

    >>> is_complete(b"no ELF object"), is_complete(b"\\x7fELF" + bytes(20))
    (True, False)
    """
    if not binary.startswith(b"\x7fELF"):
        return True  # left to the loader
    if len(binary) < ELF_HEADER.size:
        return False
    start, size, count = ELF_HEADER.unpack_from(binary)
    return bool(start + size * count <= len(binary))


def _unload(handle: int, place: ExitStack) -> None:
    dlclose(handle)
    place.close()


@contextmanager
def _in_memory(binary: bytes, name: str) -> Iterator[str]:
    descriptors = f"/proc/{os.getpid()}/fd"
    if not hasattr(os, "memfd_create") or not os.path.isdir(descriptors):
        raise OSError("there is no memory with a descriptor")
    descriptor = os.memfd_create(name[:200])
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(binary)
        # The loader takes an object that is loaded already for the same if its path is: descriptors have their
        # numbers again and again, so the path spells the number of the load, in a way that leads to the same file.
        detour = "".join(".//" if digit == "1" else "./" for digit in f"{next(_numbers):b}")
        yield f"{descriptors}/{detour}{descriptor}"
    finally:
        os.close(descriptor)


@contextmanager
def _in_temporary_file(binary: bytes, name: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="fusion-") as folder:
        path = Path(folder, f"{name[:200]}.so")
        path.write_bytes(binary)
        yield str(path)
