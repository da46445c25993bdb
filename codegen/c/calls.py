"""Calls generated functions on tensors.

Input: an object in memory, with the name of a function and the numbers of its tensors and sizes; output: a launcher,
which passes data pointers, sizes and the number of threads, and raises an error if the function returns a failed check.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from fusion.codegen.binary import Arguments, Callee, Failed
from fusion.codegen.c.load import load
from fusion.lowering.errors import OutOfMemory

NO_MEMORY = 2
"""The bit of a function's result that says that there was no memory for its scratch arrays; the bit 1 says that a check
has failed."""

SHARE_SUFFIX, SCRATCH_SUFFIX = "share", "scratch"
"""Ends of the names of the functions that compute one thread's share of a launch, and that return the bytes of scratch
memory which that needs; a kernel has both or neither."""

REGION = "#pragma omp parallel"
"""The text with which the function of a kernel opens a parallel region."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The function of a launcher without sizes, for launches in a sequence (`sequence.py`).

    Attributes:
        function: holds the library.
        address: of the function.
        tensors: the number of its tensors.
        error: its result, and its arguments → the error.
        opens_region: whether it spreads loops over threads in a parallel region.
        share: the address of the function of one thread's share; 0: there is none.
        scratch: bytes of scratch memory for a share.
    """

    function: object
    address: int
    tensors: int
    error: Callable[[int, Arguments], Exception]
    opens_region: bool
    share: int = 0
    scratch: int = 0


def entry_of(launch: object) -> Entry | None:
    """Return the function behind a launcher; None of a launcher with sizes, or of another target."""
    entry = getattr(launch, ENTRY, None)
    return entry if isinstance(entry, Entry) else None


ENTRY = "entry"
"""The attribute of a launcher with its `Entry`."""


def launcher_of(binary: bytes, callee: Callee, failed: Failed, source: str) -> Callable[..., None]:
    """Load a function of an object that was compiled from `source`, and return its launcher.

    Raises:
        OSError: the object cannot be loaded.
        AttributeError: it has no such function.
    """
    library = load(binary, callee.name)
    function = library[callee.function]
    count = callee.tensors
    function.argtypes = [ctypes.c_void_p] * count + [ctypes.c_int64] * callee.sizes + [ctypes.c_int]
    function.restype = ctypes.c_int
    call = cast("Callable[..., int]", function)
    pointer, threads = torch.Tensor.data_ptr, torch.get_num_threads

    def error(result: int, args: Arguments) -> Exception:
        if result & NO_MEMORY:
            return OutOfMemory(f"there is no memory for the scratch arrays of kernel {callee.name}")
        return failed(args)

    def launch(*args: torch.Tensor) -> None:
        if result := call(*map(pointer, args), threads()):
            raise error(result, args)

    def launch_sized(*args: torch.Tensor | int) -> None:
        held = cast("tuple[torch.Tensor, ...]", args[:count])
        if result := call(*map(pointer, held), *args[count:], threads()):
            raise error(result, args)

    if callee.sizes:
        return launch_sized
    entry = Entry(function, _address(function), count, error, REGION in source, *_share_in(library, callee.function))
    setattr(launch, ENTRY, entry)
    return launch


def _share_in(library: ctypes.CDLL, name: str) -> tuple[int, int]:
    """Return the address of the function of one thread's share, and its scratch memory; 0 where there is none."""
    try:
        share, scratch = library[f"{name}_{SHARE_SUFFIX}"], library[f"{name}_{SCRATCH_SUFFIX}"]
    except AttributeError:
        return 0, 0
    scratch.argtypes, scratch.restype = (), ctypes.c_int64
    return _address(share), cast("Callable[[], int]", scratch)()


def _address(function: object) -> int:
    return ctypes.cast(cast("ctypes.c_void_p", function), ctypes.c_void_p).value or 0
