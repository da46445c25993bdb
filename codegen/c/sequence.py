"""Launches several kernels in one call.

Input: the functions of kernels, and for each of their tensors its place in an argument of the call, or in a workspace;
output: a callable that launches them one after the other.  A launch then costs a call in C, instead of Python's look at
each tensor, and its conversion of each address.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias, cast

import torch

from fusion.codegen.c.build import build_object
from fusion.codegen.c.calls import Entry
from fusion.codegen.c.load import load
from fusion.lowering.errors import BuildError, Unsupported

MOST_TENSORS = 48
"""The most tensors of a kernel in a sequence: there is a line of C for each number."""

NAME = "launch_in_sequence"

ARGUMENT_BITS = 16
"""The lowest bits of an address in an argument, which hold the position of that."""

Address: TypeAlias = int
"""The address of a tensor: -1 minus its offset in bytes in the workspace, or the position of an argument and, above its
bits, the offset in that."""

Launched: TypeAlias = Callable[[Sequence[torch.Tensor], int], "tuple[int, int] | None"]
"""Launches kernels on tensors, with the address of the workspace; returns the number of the first that failed, and its
result."""

InSequence: TypeAlias = Callable[..., int]
"""The function in C that launches a sequence: steps, their number, places, addresses, workspace, threads → 0, or the
number of the launch that failed, times 4, and its result."""

_STEP = struct.Struct("=qii")
"""The layout of `Step`: a function, the number of its tensors, and the position of its first place."""


def in_workspace(begin: int) -> Address:
    """Return the address of a tensor at a byte of the workspace."""
    return -1 - begin


def in_argument(position: int, begin: int = 0) -> Address:
    """Return the address of a tensor at a byte of an argument.

    >>> in_argument(3), in_argument(3, 64) >> ARGUMENT_BITS
    (3, 64)
    """
    assert position < 1 << ARGUMENT_BITS, "a call has fewer arguments"
    return begin << ARGUMENT_BITS | position


def source() -> str:
    """Return the C source, which is the same for all sequences."""
    cases = []
    for count in range(MOST_TENSORS + 1):
        types, values = "void *, " * count, "".join(f"T({k}), " for k in range(count))
        cases.append(f"        case {count}: result = ((int (*)({types}int))step->call)({values}threads); break;")
    most = (1 << ARGUMENT_BITS) - 1
    head = f"""\
#include <stdint.h>
typedef struct {{ int64_t call; int32_t tensors, first; }} Step;
#define T(k) (of[k] < 0 ? workspace + (-1 - of[k]) : (char *)addresses[of[k] & {most}] + (of[k] >> {ARGUMENT_BITS}))
int64_t {NAME}(const Step *steps, int64_t count, const int64_t *places, const uint64_t *addresses, char *workspace,
        int threads) {{
    for (int64_t number = 0; number < count; number++) {{
        const Step *const step = steps + number;
        const int64_t *const of = places + step->first;
        int result = 0;
        switch (step->tensors) {{"""
    tail = """\
        }
        if (result) return number << 2 | result;
    }
    return 0;
}
"""
    return "\n".join([head, *cases, tail])


def function_in(binary: bytes) -> InSequence:
    """Load the function of an object.

    Raises:
        OSError: the object cannot be loaded.
        AttributeError: it has no such function.
    """
    function = load(binary, NAME)[NAME]
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 3, ctypes.c_int]
    function.restype = ctypes.c_int64
    return cast("InSequence", function)


@lru_cache(maxsize=1)
def in_sequence() -> InSequence | None:
    """Return the function, compiled now or before; None if it cannot be."""
    try:
        return build_object(source(), NAME, function_in)
    except (BuildError, Unsupported):
        return None


def object_for(arch: str) -> bytes:
    """Return the object with the function for `arch` (`processor.py`).

    Raises:
        Unsupported: nothing can be compiled for `arch` here.
        BuildError: no compiler, or its message.
    """
    return build_object(source(), NAME, bytes, arch=arch)


def launched_in_sequence(
    entries: Sequence[Entry], places: Sequence[Sequence[Address]], function: InSequence
) -> Launched:
    """Return a callable that launches functions on the tensors in these places by `function`."""
    steps, flat = bytearray(), array("q")
    for entry, of in zip(entries, places, strict=True):
        steps += _STEP.pack(entry.address, entry.tensors, len(flat))
        flat.extend(of)
    held = (ctypes.c_char * len(steps)).from_buffer(steps), (ctypes.c_int64 * len(flat)).from_buffer(flat)
    steps_at, places_at = (ctypes.addressof(each) for each in held)
    count, pointer, threads = len(entries), torch.Tensor.data_ptr, torch.get_num_threads
    kept = *held, *entries

    def launch(tensors: Sequence[torch.Tensor], workspace: int) -> tuple[int, int] | None:
        assert kept
        addresses = array("Q", map(pointer, tensors))
        result = function(steps_at, count, places_at, addresses.buffer_info()[0], workspace, threads())
        return divmod(result, 4) if result else None

    return launch
