"""Calls generated functions on tensors.

Input: an object in memory, with the name of a function and the numbers of its tensors and sizes; output: a launcher,
which passes data pointers, sizes and the number of threads, and raises what the function's result says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import torch

from fusion.codegen.c.load import load

NO_MEMORY = 2
"""The bit of a function's result that says that there was no memory for its scratch arrays; the bit 1 says that a check
has failed."""

Arguments: TypeAlias = "Sequence[torch.Tensor | int]"
"""Tensors, then sizes."""


def launcher_of(
    binary: bytes, name: str, tensors: int, sizes: int, error: Callable[[int, Arguments], Exception]
) -> Callable[..., None]:
    """Load the function `name` of an object, and return what launches it on as many tensors, and then sizes.

    Args:
        error: returns what to raise for a result that is not 0, and the arguments.

    Raises:
        OSError: the object cannot be loaded.
        AttributeError: it has no such function.
    """
    function = load(binary, name)[name]
    function.argtypes = [ctypes.c_void_p] * tensors + [ctypes.c_int64] * sizes + [ctypes.c_int]
    function.restype = ctypes.c_int
    call = cast("Callable[..., int]", function)
    pointer, threads = torch.Tensor.data_ptr, torch.get_num_threads

    def launch(*args: torch.Tensor) -> None:
        if result := call(*map(pointer, args), threads()):
            raise error(result, args)

    def launch_sized(*args: torch.Tensor | int) -> None:
        held = cast("tuple[torch.Tensor, ...]", args[:tensors])
        if result := call(*map(pointer, held), *args[tensors:], threads()):
            raise error(result, args)

    return launch_sized if sizes else launch
