"""Calls generated functions on tensors.

Input: an object in memory, with the name of a function and the numbers of its tensors and sizes; output: a launcher,
which passes data pointers, sizes and the number of threads, and raises an error if the function returns a failed check.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import cast

import torch

from fusion.codegen.binary import Arguments, Callee, Failed
from fusion.codegen.c.load import load
from fusion.lowering.errors import OutOfMemory

NO_MEMORY = 2
"""The bit of a function's result that says that there was no memory for its scratch arrays; the bit 1 says that a check
has failed."""


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

    return launch_sized if callee.sizes else launch
