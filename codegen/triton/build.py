"""Build: a generated file as something to launch, at the least cost per launch.

What enters is a kernel and its source; what leaves is a launcher.  Everything that can be known before a launch is:
the kernel is compiled for types and alignments that the kernel promises, the grid is computed, constants are laid out.
What is left is one call into Triton's launching stub with raw pointers and the current stream.  A launcher serves any
device of the process, loads the binary on the first launch there, and may be called from several threads.

With symbolic sizes there is one binary per set of sizes that are multiples of 16, compiled when first needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from codegen.target import Launcher
from codegen.triton import interpreted
from codegen.triton.aot import compile_for
from codegen.triton.load import Generated, load
from lowering.errors import BuildError
from lowering.kernel import Kernel

Run: TypeAlias = Callable[..., None]

# The launching stub takes these arguments in this order; in other versions of Triton it is reached through its owner.
_KNOWN_STUB = triton.__version__.startswith("3.6.")


def build(kernel: Kernel, source: str) -> Launcher:
    """Compile `source` for the current device and return what launches it.

    Under `TRITON_INTERPRET=1` the launcher interprets, and takes CPU tensors.

    Raises:
        BuildError: with Triton's own message, or where there is no device.
    """
    generated = load(kernel, source)
    if not isinstance(generated.function, JITFunction):
        return interpreted.launcher(kernel, generated)
    if not torch.cuda.is_available():
        raise BuildError(
            f"{kernel.name} cannot be launched: no CUDA or ROCm device is present",
            hint="`stages` compiles without one; TRITON_INTERPRET=1 runs Triton kernels on the CPU",
        )
    ready = _Ready(kernel, generated)
    if not kernel.sizes:
        ready.compiled(torch.cuda.current_device(), ())
        return _static_launcher(ready)
    return _dynamic_launcher(ready)


class _Ready:
    """The binaries of one kernel, by device and by which sizes are multiples of 16."""

    def __init__(self, kernel: Kernel, generated: Generated) -> None:
        self.kernel, self.generated = kernel, generated
        self.runs: dict[tuple[int, tuple[bool, ...]], Run] = {}
        self._compiled: dict[tuple[int, tuple[bool, ...]], Any] = {}
        self._lock = threading.Lock()

    def compiled(self, device: int, multiples: tuple[bool, ...]) -> Any:
        """Compile for `device`, which need not be the current one."""
        with self._lock:
            found = self._compiled.get((device, multiples))
            if found is None:
                with torch.cuda.device(device):
                    target = driver.active.get_current_target()
                found = compile_for(self.kernel, self.generated, target, multiples)
                self._compiled[device, multiples] = found
            return found

    def run(self, device: int, multiples: tuple[bool, ...] = ()) -> Run:
        """What launches on `device`: called with the number of programs and the arguments of the kernel."""
        compiled = self.compiled(device, multiples)
        with self._lock, torch.cuda.device(device):
            if (device, multiples) not in self.runs:
                try:
                    compiled._init_handles()  # loads the binary
                except Exception as error:
                    raise BuildError(f"{self.kernel.name} cannot be loaded: {error}") from error
                constants = tuple(self.generated.constants.values())
                self.runs[device, multiples] = _run(compiled, device, constants)
            return self.runs[device, multiples]

    def programs(self, device: int, *sizes: int) -> int:
        """The number of programs; persistent ones are one per multiprocessor of `device`."""
        module = self.generated.module
        count = self.generated.grid(*sizes)
        if hasattr(module, "PROGRAMS"):
            here = torch.cuda.get_device_properties(device).multi_processor_count
            return min(count, here) if count < module.PROGRAMS else here
        return count


def _run(compiled: Any, device: int, constants: tuple[int, ...]) -> Run:
    """The cheapest way to launch `compiled` that this version of Triton has."""
    stream_of = torch._C._cuda_getCurrentRawStream
    owner = compiled.run
    scratch = getattr(compiled.metadata, "global_scratch_size", 0)
    direct = _KNOWN_STUB and torch.version.hip is None and getattr(owner, "profile_scratch_size", 0) == 0
    if not direct:

        def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int8, device=torch.device("cuda", device))

        def run_through_owner(programs: int, args: list[int]) -> None:
            if scratch:
                triton.set_allocator(allocate)
            compiled[(programs, 1, 1)](*args, *constants, stream=stream_of(device))

        return run_through_owner

    launch, function, metadata = owner.launch, compiled.function, compiled.packed_metadata
    cooperative, dependent = owner.launch_cooperative_grid, owner.launch_pdl

    def run(programs: int, args: list[int]) -> None:
        memory = None
        if scratch:  # descriptors; freed in stream order, so the kernel is done with it
            memory = torch.empty(programs * scratch, dtype=torch.int8, device=torch.device("cuda", device))
        launch(
            *(programs, 1, 1, stream_of(device), function, cooperative, dependent, memory, None),
            *(metadata, None, None, None, *args, *constants),
        )

    return run


def _static_launcher(ready: _Ready) -> Launcher:
    runs: dict[int, tuple[Run, int]] = {}

    def first(device: int) -> tuple[Run, int]:
        runs[device] = ready.run(device), ready.programs(device)
        return runs[device]

    def launch(*tensors: torch.Tensor) -> None:
        device = tensors[0].get_device()
        run, programs = runs.get(device) or first(device)
        if device == torch._C._cuda_getDevice():
            run(programs, [tensor.data_ptr() for tensor in tensors])
        else:
            with torch.cuda.device(device):
                run(programs, [tensor.data_ptr() for tensor in tensors])

    return launch


def _dynamic_launcher(ready: _Ready) -> Launcher:
    count = len(ready.kernel.params)

    def launch(*args: Any) -> None:
        device, sizes = args[0].get_device(), args[count:]
        multiples = tuple([size % 16 == 0 for size in sizes])
        run = ready.runs.get((device, multiples)) or ready.run(device, multiples)
        programs = ready.programs(device, *sizes)
        pointers = [tensor.data_ptr() for tensor in args[:count]]
        if device == torch._C._cuda_getDevice():
            run(programs, [*pointers, *sizes])
        else:
            with torch.cuda.device(device):
                run(programs, [*pointers, *sizes])

    return launch
