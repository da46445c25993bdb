"""Passes tensors to the driver in one call, without Triton's launching stubs.

Triton's stub parses a tuple of all possible launch options, and a stub is compiled for each number of arguments; in
some releases a dozen Python calls precede it.  `direct.c` is compiled once, and serves all kernels: a launch asks
tensors for their addresses and passes them to the driver.  Input: a binary; output: a `Run` for it, or the
`DirectLaunch` that calls one.

Triton's own launchers handle tensor descriptors, numbers by value, clusters, profiling, and devices that are not
NVIDIA's; and everything where `direct.c` cannot be compiled.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import triton
from triton.runtime.build import compile_module_from_src
from triton.runtime.driver import driver

from fusion.codegen.target import Launcher
from fusion.codegen.triton.arguments import on_device
from fusion.codegen.triton.launch.counters import Run
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.kernel import Kernel

WARP = 32
OWN = 2
"""Arguments that Triton adds to every kernel: memory for its programs, and for a profiler."""

NO_CONTEXT, OTHER_CONTEXT = 201, 400
"""The driver's error numbers for a launch in a thread without a device, as a thread of autograd may be, and in a thread
on another device, whose context does not own the handle.
"""


class DirectLaunch(Protocol):
    """A launch of a kernel, called with its tensors; until there is a binary it calls its fallback launcher."""

    def __call__(self, *tensors: Any) -> None:
        """Launch on these tensors."""

    def ready(
        self, device: int, prepared: tuple[object, ...], values: tuple[int, ...], counters: dict[int, int] | None
    ) -> None:
        """Launch `prepared` on `device` from here on.

        `values` are passed after the addresses, and after them the `counters` of the stream, if there are any.
        """


@dataclass(frozen=True, slots=True)
class LoadedBinary:
    """A kernel that is loaded on a device.

    Attributes:
        entry: the address of the driver's function that launches.
        function: the driver's handle of the kernel.
        shared: bytes of shared memory.
        scratch: bytes of private memory of each program.
        dependent: may it start before the previous launch has ended?
        counters: the addresses of counters by stream, as far as allocated; None if programs do not count themselves.
    """

    device: int
    entry: int
    function: int
    threads: int
    shared: int
    scratch: int
    dependent: bool
    cooperative: bool
    counters: dict[int, int] | None = None

    def prepared(self, programs: int) -> tuple[object, ...]:
        """Return a launch of `programs` programs, in the form that `direct.c` takes."""
        attributes = self.dependent, self.cooperative
        return self.entry, self.function, programs, self.threads, self.shared, *attributes


_building = threading.Lock()


def stub() -> Any:
    """Return the compiled `direct.c`, or None if it cannot be compiled."""
    with _building:
        return _compiled()[0]


def lacking() -> str:
    """Return why `direct.c` cannot be compiled; empty if it can."""
    with _building:
        return _compiled()[1]


@lru_cache(maxsize=1)
def _compiled() -> tuple[Any, str]:
    source, include = Path(__file__).with_name("direct.c"), Path(triton.__file__).parent / "backends/nvidia/include"
    try:
        text = source.read_text(encoding="utf-8")
        return compile_module_from_src(text, "fusion_direct", [], [str(include)], []), ""
    except Exception as failure:  # no compiler, or no headers
        cause = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        return None, f"launches go through Triton's slower stubs: direct.c cannot be compiled ({cause})"


@lru_cache(maxsize=1)
def _entry() -> int:
    """Return the address of the driver's launch function; 0 if it has none."""
    with suppress(OSError, AttributeError):
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def declared(ptx: str) -> int:
    """Return the number of arguments of the kernel of a text.

    >>> declared(".visible .entry add(.param .u64 add_param_0, .param .u32 add_param_1)")
    2
    """
    return ptx.partition(".entry")[2].partition(")")[0].count(".param")


def loaded(compiled: Any, device: int, count: int) -> LoadedBinary | None:
    """Return Triton's `CompiledKernel`, loaded on `device`, the current one; None if Triton has to launch it.

    Args:
        count: the arguments that a launch passes.  `direct.c` adds the two that Triton adds; a release that adds
            others launches by itself.
    """
    metadata = compiled.metadata
    if torch.version.hip is not None or stub() is None or not _entry():
        return None
    if declared(compiled.asm["ptx"]) != count + OWN:
        return None
    if getattr(metadata, "num_ctas", 1) != 1 or getattr(metadata, "profile_scratch_size", 0):
        return None
    utils = driver.active.utils
    _, function, *_, most = utils.load_binary(compiled.name, compiled.kernel, metadata.shared, device)
    threads = WARP * metadata.num_warps
    if threads > most:
        raise BuildError(f"{compiled.name} needs {threads} threads, of which {most} have enough registers")
    scratch = getattr(metadata, "global_scratch_size", 0)
    dependent = getattr(metadata, "launch_pdl", False)
    cooperative = getattr(metadata, "launch_cooperative_grid", False)
    return LoadedBinary(device, _entry(), function, threads, metadata.shared, scratch, dependent, cooperative)


def run_of(binary: LoadedBinary, allocate: Callable[[int], torch.Tensor]) -> Run:
    """Return a function that launches `binary` with integers on the current stream; `allocate` returns memory for
    programs.

    A thread in which nothing has called CUDA yet, as one of autograd, has no context; the launch returns an error then.
    """
    stream_of, launch, scratch = torch._C._cuda_getCurrentRawStream, stub().launch, binary.scratch

    def run(programs: int, args: Sequence[int]) -> None:
        if programs > 0:
            memory = allocate(programs * scratch).data_ptr() if scratch else 0
            described = binary.prepared(programs), stream_of(binary.device), memory, tuple(args)
            error = launch(*described)
            if error in (NO_CONTEXT, OTHER_CONTEXT):
                _enter(binary.device)
                error = launch(*described)
            if error:
                raise RuntimeError(f"CUDA refuses a launch: {_text(error)}")

    return run


def _enter(device: int) -> None:
    """Make PyTorch's context of a device the context of this thread."""
    library, number, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    library.cuDeviceGet(ctypes.byref(number), device)
    library.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
    library.cuCtxSetCurrent(context)


def _text(error: int) -> str:
    """Return the driver's text for an error number."""
    text = ctypes.c_char_p()
    ctypes.CDLL("libcuda.so.1").cuGetErrorString(error, ctypes.byref(text))
    return (text.value or b"").decode() or f"error {error}"


def launch_of(kernel: Kernel, otherwise: Launcher) -> DirectLaunch | None:
    """Return a launch of `kernel`, which calls `otherwise` until it is ready and where it cannot be used.

    None if it can never be used: for numbers by value, or without the stub.
    """
    if stub() is None or any(param.number for param in kernel.params):
        return None
    state = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream, torch.cuda.is_current_stream_capturing
    promised = tuple(param.aligned for param in kernel.params)
    return cast("DirectLaunch", stub().Launch(otherwise, *state, promised, on_device(kernel)))
