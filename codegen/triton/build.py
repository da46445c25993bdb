"""Build: a generated file as something to launch, at the least cost per launch.

What enters is a kernel and its source; what leaves is a launcher.  Everything that can be known before a launch is:
the kernel is compiled for types and alignments that it promises, the grid is computed, constants are laid out.  What
is left is one call into Triton's launching stub with raw pointers and the current stream.  A launcher serves every
device of the process, loads the binary on the first launch there, and may be called from several threads.

With symbolic sizes there is one binary per set of sizes that are multiples of 16, compiled when first needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from codegen.target import Launcher
from codegen.triton import interpreted
from codegen.triton.aot import compile_for
from codegen.triton.load import Generated, Step, load
from lowering.errors import BuildError
from lowering.kernel import Kernel

Run: TypeAlias = Callable[[int, Sequence[int]], None]
"""Launches on one device: called with the number of programs, then pointers and sizes."""

# Its launching stub takes its arguments in the order below; that of other versions is reached through its owner.
_KNOWN_STUB = triton.__version__.startswith("3.6.")


def build(kernel: Kernel, source: str) -> Launcher:
    """Compile `source` for the current device and return what launches it.

    Under `TRITON_INTERPRET=1` the launcher interprets, and takes CPU tensors.

    Raises:
        BuildError: with Triton's own message, or where there is no device.
    """
    generated = load(kernel, source)
    if not isinstance(generated.steps[0].function, JITFunction):
        return interpreted.launcher(kernel, generated)
    if not torch.cuda.is_available():
        raise BuildError(
            f"{kernel.name} cannot be launched: no CUDA or ROCm device is present",
            hint="`stages` compiles without one; TRITON_INTERPRET=1 runs Triton kernels on the CPU",
        )
    ready = _Ready(kernel, generated)
    if kernel.sizes:
        return _dynamic_launcher(ready)
    ready.compiled(torch.cuda.current_device(), ())
    return _static_launcher(ready)


class _Ready:
    """The binaries of one source, by device and by which sizes are multiples of 16."""

    def __init__(self, kernel: Kernel, generated: Generated) -> None:
        self.kernel, self.generated = kernel, generated
        self.runs: dict[tuple[int, tuple[bool, ...]], Run] = {}
        self._compiled: dict[tuple[int, tuple[bool, ...]], list[Any]] = {}
        self._lock = threading.RLock()

    def compiled(self, device: int, multiples: tuple[bool, ...]) -> list[Any]:
        """Every step compiled for `device`, which need not be the current one."""
        with self._lock:
            if (device, multiples) not in self._compiled:
                with torch.cuda.device(device):
                    target = driver.active.get_current_target()
                first, *rest = self.generated.steps
                found = [compile_for(first, target, multiples), *(compile_for(step, target) for step in rest)]
                self._compiled[device, multiples] = found
            return self._compiled[device, multiples]

    def run(self, device: int, multiples: tuple[bool, ...] = ()) -> Run:
        """What launches on `device`; loads the binaries."""
        with self._lock, torch.cuda.device(device):
            if (device, multiples) not in self.runs:
                compiled = self.compiled(device, multiples)
                try:
                    runs = [_run(each, device, step) for each, step in zip(compiled, self.generated.steps, strict=True)]
                except Exception as error:
                    raise BuildError(f"{self.kernel.name} cannot be loaded: {error}") from error
                self.runs[device, multiples] = runs[0] if len(runs) == 1 else _chained(runs, self.generated.steps)
            return self.runs[device, multiples]

    def programs(self, device: int, *sizes: int) -> int:
        """The number of programs; persistent ones are at most one per multiprocessor of `device`."""
        if not self.generated.persistent:
            return self.generated.grid(*sizes)
        return self.generated.grid(*sizes, programs=torch.cuda.get_device_properties(device).multi_processor_count)


def _run(compiled: Any, device: int, step: Step) -> Run:
    """The cheapest way to launch `compiled` that this version of Triton has."""
    stream_of = torch._C._cuda_getCurrentRawStream
    owner, constants = compiled.run, tuple(step.constants.values())  # `run` loads the binary
    scratch = getattr(compiled.metadata, "global_scratch_size", 0)

    def allocate(size: int, alignment: int = 16, stream: int | None = None) -> torch.Tensor:
        # Freed in stream order: by the time the memory is used again, the kernel is done with it.
        return torch.empty(size, dtype=torch.int8, device=torch.device("cuda", device))

    def run_through_owner(programs: int, args: Sequence[int]) -> None:
        if scratch:
            triton.set_allocator(allocate)
        if programs > 0:
            compiled[(programs, 1, 1)](*args, *constants, stream=stream_of(device))

    if not _KNOWN_STUB or torch.version.hip is not None or owner.profile_scratch_size > 0:
        return run_through_owner

    launch, function, metadata = owner.launch, compiled.function, compiled.packed_metadata
    cooperative, dependent = owner.launch_cooperative_grid, owner.launch_pdl

    def run(programs: int, args: Sequence[int]) -> None:
        memory = allocate(programs * scratch) if scratch else None
        launch(
            *(programs, 1, 1, stream_of(device), function, cooperative, dependent, memory, None),
            *(metadata, None, None, None, *args, *constants),
        )

    return run


def _chained(runs: Sequence[Run], steps: Sequence[Step]) -> Run:
    """A launch of several steps: after the first come single programs, on the tensors they take."""
    after = list(zip(runs[1:], (step.tensors for step in steps[1:]), strict=True))

    def run(programs: int, args: Sequence[int]) -> None:
        runs[0](programs, args)
        for single, tensors in after:
            single(1, [args[position] for position in tensors])

    return run


def _static_launcher(ready: _Ready) -> Launcher:
    runs: dict[int, tuple[Run, int]] = {}
    current = torch._C._cuda_getDevice

    def first(device: int) -> tuple[Run, int]:
        runs[device] = ready.run(device), ready.programs(device)
        return runs[device]

    def launch(*tensors: torch.Tensor) -> None:
        device = tensors[0].get_device()
        run, programs = runs.get(device) or first(device)
        if device == current():
            run(programs, [tensor.data_ptr() for tensor in tensors])
        else:
            with torch.cuda.device(device):
                run(programs, [tensor.data_ptr() for tensor in tensors])

    return launch


def _dynamic_launcher(ready: _Ready) -> Launcher:
    count = len(ready.kernel.params)
    current = torch._C._cuda_getDevice

    def launch(*args: Any) -> None:
        device, sizes = args[0].get_device(), args[count:]
        multiples = tuple([size % 16 == 0 for size in sizes])
        run = ready.runs.get((device, multiples)) or ready.run(device, multiples)
        programs = ready.programs(device, *sizes)
        values = [*(tensor.data_ptr() for tensor in args[:count]), *sizes]
        if device == current():
            run(programs, values)
        else:
            with torch.cuda.device(device):
                run(programs, values)

    return launch
