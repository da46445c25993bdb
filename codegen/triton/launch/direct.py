"""Direct: launches that go from tensors to the driver in one call, past Triton's launching stubs.

Triton's stub parses a tuple of all that a launch could have, and the stub that takes their number of arguments is
compiled for each such number; in some releases a dozen calls of Python precede it.  `direct.c` is compiled once, and
holds what does not vary: a launch asks tensors for their addresses and gives them to the driver.  What enters is a
binary; what leaves is a `Run` for it, or the `Launch` that calls one.

Left to Triton's own launchers are tensor descriptors, numbers by value, clusters, profiling, and devices that are not
NVIDIA's; everything is where `direct.c` cannot be compiled.
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
from fusion.lowering.kernel import Kernel

WARP = 32
OWN = 2
"""Arguments of every kernel that Triton adds: memory for its programs, and for a profiler."""

NO_CONTEXT, OTHER_CONTEXT = 201, 400
"""The driver's numbers for a launch in a thread that has no device yet, as a thread of autograd's may not, and for one
in a thread that is on another device: a handle is not of its context.
"""


class Launch(Protocol):
    """A launch of a kernel, called with its tensors; until there is a binary it calls what it was made with."""

    def __call__(self, *tensors: Any) -> None:
        """Launches."""

    def ready(
        self, device: int, prepared: tuple[object, ...], values: tuple[int, ...], counters: dict[int, int] | None
    ) -> None:
        """From here on `prepared` is launched on `device`, with `values` behind the addresses, and behind these, if
        there are any, the `counters` of the stream.
        """


@dataclass(frozen=True, slots=True)
class Binary:
    """A kernel that is loaded on a device.

    Attributes:
        entry: the address of the driver's function that launches.
        function: the driver's handle of the kernel.
        shared: bytes of shared memory.
        scratch: bytes of memory that each program takes for itself.
        dependent: may it begin before the launch ahead of it has ended?
        counters: where programs count themselves, by stream, as far as it is known; None if they do not.
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
        """So many programs of it, as `direct.c` takes that."""
        how = self.dependent, self.cooperative
        return self.entry, self.function, programs, self.threads, self.shared, *how


_building = threading.Lock()


def stub() -> Any:
    """The compiled `direct.c`, or None where that cannot be had."""
    with _building:
        return _compiled()[0]


def lacking() -> str:
    """Why there is no stub; empty if there is one."""
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
    """The address of the driver's function that launches; 0 where it has none."""
    with suppress(OSError, AttributeError):
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def declared(ptx: str) -> int:
    """How many arguments the kernel of a text takes.

    >>> declared(".visible .entry add(.param .u64 add_param_0, .param .u32 add_param_1)")
    2
    """
    return ptx.partition(".entry")[2].partition(")")[0].count(".param")


def loaded(compiled: Any, device: int, given: int) -> Binary | None:
    """Triton's `CompiledKernel`, loaded on `device`, the current one; None where Triton has to launch it.

    Args:
        given: how many arguments a launch is given.  The two that Triton adds, `direct.c` adds too; a release that adds
            others launches by itself.
    """
    metadata = compiled.metadata
    if torch.version.hip is not None or stub() is None or not _entry():
        return None
    if declared(compiled.asm["ptx"]) != given + OWN:
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
    return Binary(device, _entry(), function, threads, metadata.shared, scratch, dependent, cooperative)


def run_of(binary: Binary, allocate: Callable[[int], torch.Tensor]) -> Run:
    """Launches `binary` with integers on the current stream; `allocate` gives memory for its programs.

    A thread in which nothing has called CUDA yet, as those of autograd, has no context; the launch tells.
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
    """Make the context that PyTorch has on a device that of this thread."""
    library, number, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    library.cuDeviceGet(ctypes.byref(number), device)
    library.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
    library.cuCtxSetCurrent(context)


def _text(error: int) -> str:
    """The driver's words for the number of an error."""
    text = ctypes.c_char_p()
    ctypes.CDLL("libcuda.so.1").cuGetErrorString(error, ctypes.byref(text))
    return (text.value or b"").decode() or f"error {error}"


def launch_of(kernel: Kernel, otherwise: Launcher) -> Launch | None:
    """What launches `kernel` once it is ready, and until then and out of the ordinary calls `otherwise`; None where all
    launches are out of the ordinary.
    """
    if stub() is None or any(param.number for param in kernel.params):
        return None
    state = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream, torch.cuda.is_current_stream_capturing
    promised = tuple(param.aligned for param in kernel.params)
    return cast("Launch", stub().Launch(otherwise, *state, promised, on_device(kernel)))
