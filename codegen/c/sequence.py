"""Launches several kernels in one call.

Input: the functions of kernels, and for each of their tensors its place in an argument of the call, or in a workspace;
output: a callable that launches them one after the other.  A launch then costs a call in C, instead of Python's look at
each tensor, and its conversion of each address.

Launches that are divided into shares, and those between them, are computed in one parallel region, as far as none opens
a region of its own: each thread computes its share of a divided launch, the first thread alone launches the others.
Threads wait for each other after each divided launch, and before one that follows others.  A launch that fails is
noted; the threads leave the region at the next point at which all of them see that, so none waits for another in vain.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias, cast

import torch

from fusion.codegen.c.build import bind_openmp, build_object
from fusion.codegen.c.calls import NO_MEMORY, Entry
from fusion.codegen.c.load import load
from fusion.lowering.errors import BuildError, Unsupported

MOST_TENSORS = 48
"""The most tensors of a kernel in a sequence: there is a line of C for each number."""

NAME = "launch_steps"

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

_STEP = struct.Struct("=qqqiii4x")
"""The layout of `Step`: the function of a launch, that of a share and its scratch memory, the number of tensors, the
position of the first place, and whether the launch opens a region."""


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
    launches, shares = list[str](), list[str]()
    for count in range(MOST_TENSORS + 1):
        types, values = "void *, " * count, "".join(f"T({k}), " for k in range(count))
        launches.append(f"        case {count}: return ((int (*)({types}int))step->call)({values}all->threads);")
        call = f"((int (*)({types}char *, int))step->share)({values}scratch, threads)"
        shares.append(f"        case {count}: return {call};")
    return _SOURCE.format(
        most=(1 << ARGUMENT_BITS) - 1,
        bits=ARGUMENT_BITS,
        launches="\n".join(launches),
        shares="\n".join(shares),
        no_memory=NO_MEMORY,
        name=NAME,
    )


_SOURCE = """\
#include <stdint.h>
int omp_get_thread_num(void);
int omp_get_num_threads(void);
void *aligned_alloc(unsigned long, unsigned long);

typedef struct {{ int64_t call, share, scratch; int32_t tensors, first, opens_region; }} Step;
typedef struct {{
    const Step *steps;
    const int64_t *places;
    const uint64_t *addresses;
    char *workspace, *scratch;
    int64_t each;  // bytes of `scratch` for each thread
    int threads;
    int64_t failed;  // 0, or the number of the launch that failed, times 4, and its result
}} Sequence;

#define T(k) (of[k] < 0 ? all->workspace + (-1 - of[k]) : \\
    (char *)all->addresses[of[k] & {most}] + (of[k] >> {bits}))

static int launched(const Sequence *all, const Step *step) {{
    const int64_t *const of = all->places + step->first;
    switch (step->tensors) {{
{launches}
    }}
    return 0;
}}

static int shared(const Sequence *all, const Step *step, int threads, int thread) {{
    const int64_t *const of = all->places + step->first;
    char *const scratch = all->scratch + thread * all->each;
    switch (step->tensors) {{
{shares}
    }}
    return 0;
}}

static _Bool failed_before(const Sequence *all, int64_t number) {{
    int64_t failed;
    #pragma omp atomic read
    failed = all->failed;
    return failed && failed >> 2 < number;  // not `number` itself: others may still be here when a share of it fails
}}

// The part of thread number `thread` of `threads` in the launches from `first` up to `end`.
static void take_part(Sequence *all, int64_t first, int64_t end, int threads, int thread) {{
    _Bool unseen = 0;  // the first thread has launched steps for which no other one has waited
    for (int64_t number = first; number < end; number++) {{
        const Step *const step = all->steps + number;
        int result = 0;
        if (step->share) {{
            if (unseen) {{
                #pragma omp barrier
            }}
            unseen = 0;
            if (failed_before(all, number)) return;
            result = shared(all, step, threads, thread);
        }} else {{
            if (thread == 0 && !failed_before(all, number)) result = launched(all, step);
            unseen = 1;
        }}
        if (result) {{
            #pragma omp atomic write
            all->failed = number << 2 | result;
        }}
        if (step->share && number + 1 < end) {{
            #pragma omp barrier
        }}
    }}
}}

int64_t {name}(const Step *steps, int64_t count, const int64_t *places, const uint64_t *addresses, char *workspace,
        int threads) {{
    Sequence all = {{steps, places, addresses, workspace, 0, 0, threads, 0}};
    int64_t largest = 0;
    for (int64_t number = 0; number < count; number++)
        if (steps[number].scratch > all.each) all.each = steps[largest = number].scratch;
    if (all.each && !(all.scratch = aligned_alloc(64, threads * all.each))) return largest << 2 | {no_memory};
    for (int64_t first = 0, end; first < count && !all.failed; first = end) {{
        const Step *const step = steps + first;
        end = first + 1;
        if (step->share && threads > 1) {{  // up to the last share before another region
            for (int64_t next = end; next < count && !steps[next].opens_region; next++)
                if (steps[next].share) end = next + 1;
            #pragma omp parallel num_threads(threads)
            take_part(&all, first, end, omp_get_num_threads(), omp_get_thread_num());
        }} else {{
            const int result = step->share ? shared(&all, step, 1, 0) : launched(&all, step);
            all.failed = result ? first << 2 | result : 0;
        }}
    }}
    __builtin_free(all.scratch);
    return all.failed;
}}
"""


def function_in(binary: bytes) -> InSequence:
    """Load the function of an object.

    Raises:
        OSError: the object cannot be loaded.
        AttributeError: it has no such function.
        BuildError: there is no OpenMP run time.
    """
    bind_openmp()
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
        regions = entry.opens_region and not entry.share
        steps += _STEP.pack(entry.address, entry.share, entry.scratch, entry.tensors, len(flat), regions)
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
