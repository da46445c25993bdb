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
    """

    function: object
    address: int
    tensors: int
    error: Callable[[int, Arguments], Exception]


def entry_of(launch: object) -> Entry | None:
    """Return the function behind a launcher; None of a launcher with sizes, or of another target."""
    entry = getattr(launch, ENTRY, None)
    return entry if isinstance(entry, Entry) else None


ENTRY = "entry"
"""The attribute of a launcher with its `Entry`."""


def launcher_of(binary: bytes, callee: Callee, failed: Failed) -> Callable[..., None]:
    """Load a function of an object, and return its launcher.

    Raises:
        OSError: the object cannot be loaded.
        AttributeError: it has no such function.
    """
    function = load(binary, callee.name)[callee.function]
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
    setattr(launch, ENTRY, Entry(function, ctypes.cast(function, ctypes.c_void_p).value or 0, count, error))
    return launch
