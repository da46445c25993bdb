"""Builds a launcher from a generated file, at the least cost per launch.

Input: a kernel and its source; output: a launcher.  All work that can precede a launch does: the kernel is compiled for
types and declared alignments, the grid is computed, constants are laid out.  A launch is then one call, which passes
addresses to the driver (`launchers`, `direct`).  A launcher serves every device of the process, loads the binary on the
first launch there, and may be called from several threads.

With symbolic sizes there is one binary per set of sizes that are multiples of 16, among those for which that matters
(`multiples`), compiled when first needed.  So are a binary without declared alignments, for tensors that do not start
at a multiple of 16 bytes, such as `x[1:]`, and one with indices of 64 bits, for sizes that exceed 32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fusion.codegen.target import Launcher
from fusion.codegen.triton.devices import device_at
from fusion.codegen.triton.launch import host_descriptors, interpreted
from fusion.codegen.triton.launch.aot import compile_for
from fusion.codegen.triton.launch.counters import Run, counted
from fusion.codegen.triton.launch.direct import LoadedBinary, loaded, run_of
from fusion.codegen.triton.launch.launchers import BinaryRequirements, Either, launcher
from fusion.codegen.triton.launch.load import Generated, load, signature
from fusion.codegen.triton.launch.preparations import start
from fusion.codegen.triton.launch.sources import Sources
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.kernel import Kernel

# Its launching stub takes its arguments in the order below; other versions are launched through their owner.
_KNOWN_STUB = triton.__version__.startswith("3.6.")


def build(kernel: Kernel, source: str, emit: Callable[..., str]) -> Launcher:
    """Compile `source` for the current device and return a launcher.

    `emit` writes the source for tensors that are not aligned, if `source` cannot serve them, and, with `wide=True`, for
    sizes that it does not support.  Under `TRITON_INTERPRET=1` the launcher interprets, and takes CPU tensors.

    Raises:
        BuildError: with Triton's own message, or where there is no device.
    """
    generated = load(kernel, source)
    if not isinstance(generated.function, JITFunction):
        return interpreted.launcher(kernel, generated, Sources(generated, emit))
    if not torch.cuda.is_available():
        raise BuildError(
            f"{kernel.name} cannot be launched: no CUDA or ROCm device is present",
            hint="`fusion.export_kernels` compiles without one; TRITON_INTERPRET=1 runs Triton kernels on the CPU",
        )
    ready = _Ready(generated, emit)
    if not kernel.sizes:
        compiled = ready.compiled(BinaryRequirements(torch.cuda.current_device()))
        if not _takes_addresses_and_sizes(generated):
            _compile_stub(compiled)
    return Either(lambda refused: launcher(ready, kernel, refused, near=generated.near))


class _Ready:
    """The binaries of one kernel, by the requirements (`BinaryRequirements`) that they meet."""

    def __init__(self, generated: Generated, emit: Callable[..., str]) -> None:
        self.sources = Sources(generated, emit)
        self._compiled: dict[BinaryRequirements, Any] = {}
        self._runs: dict[BinaryRequirements, tuple[Run, LoadedBinary | None]] = {}
        self._lock = threading.RLock()

    def wide(self, aligned: bool, sizes: Sequence[int]) -> bool:
        """Return whether these sizes exceed the limit of the default source."""
        return self.sources.wide(aligned, sizes)

    def compiled(self, wanted: BinaryRequirements) -> Any:
        """Return the binary for a device, which need not be the current one."""
        with self._lock:
            if wanted not in self._compiled:
                source, device = self.sources.of(wanted.aligned, wanted.wide), device_at(wanted.device)
                self._compiled[wanted] = compile_for(source, device, wanted.multiples, aligned=wanted.aligned)
            return self._compiled[wanted]

    def run(self, wanted: BinaryRequirements) -> tuple[Run, LoadedBinary | None]:
        """Return (the launch function, loaded on its device; the binary, if it takes only tensors and sizes)."""
        with self._lock, torch.cuda.device(wanted.device):
            if wanted not in self._runs:
                compiled, source = self.compiled(wanted), self.sources.of(wanted.aligned, wanted.wide)
                start().driving.join()  # otherwise the driver may be built twice
                try:
                    run, binary = _run(compiled, wanted.device, source)
                    if source.counted:
                        run, counters = counted(run, wanted.device, source.counters)
                        binary = None if binary is None else replace(binary, counters=counters)
                    self._runs[wanted] = run, binary
                except Exception as error:
                    raise BuildError(f"{source.kernel.name} cannot be loaded: {error}") from error
            return self._runs[wanted]

    def programs(self, wanted: BinaryRequirements, sizes: Sequence[int]) -> int:
        """Return the number of programs, for persistent kernels at most the number that the device runs at once."""
        source = self.sources.of(wanted.aligned, wanted.wide)
        if not source.persistent:
            return source.grid(*sizes)
        return source.grid(*sizes, processors=torch.cuda.get_device_properties(wanted.device).multi_processor_count)


def _takes_addresses_and_sizes(source: Generated) -> bool:
    """Return whether a launch passes only addresses and sizes."""
    return not source.descriptor_types and not any(param.number for param in source.kernel.params)


def _compile_stub(compiled: Any) -> None:
    """Have Triton compile its stub for the number of arguments of `compiled`, which takes the first launch 0.27 s
    otherwise.
    """
    start().driving.join()
    with suppress(Exception):  # the launch reports the error
        driver.active.launcher_cls(compiled.src, compiled.metadata)


def _run(compiled: Any, device: int, source: Generated) -> tuple[Run, LoadedBinary | None]:
    """Return the cheapest way to launch `compiled`, and the binary if it takes only addresses and sizes."""
    native: Any = torch._C._dynamo.guards  # its stub lacks the function
    empty: Callable[..., torch.Tensor] = native._empty_strided_cuda  # the fastest allocation on the current device

    def allocate(size: int, alignment: int = 16, stream: int | None = None) -> torch.Tensor:
        # Freed in stream order: by the time the memory is used again, the kernel is done with it.
        return empty((size,), (1,), torch.int8)

    count = len(signature(source)) - len(source.constants)
    binary = loaded(compiled, device, count) if _takes_addresses_and_sizes(source) else None
    if binary is not None:
        return run_of(binary, allocate), None if binary.scratch else binary
    return _run_of_triton(compiled, device, source, allocate), None


def _run_of_triton(compiled: Any, device: int, source: Generated, allocate: Callable[..., torch.Tensor]) -> Run:
    """Return the cheapest launch that this version of Triton has."""
    stream_of = torch._C._cuda_getCurrentRawStream
    owner, constants = compiled.run, tuple(source.constants.values())  # `run` loads the binary
    scratch = getattr(compiled.metadata, "global_scratch_size", 0)

    def run_through_owner(programs: int, args: Sequence[int]) -> None:
        if scratch:
            triton.set_allocator(allocate)
        if programs > 0:
            described = (
                host_descriptors.descriptors_of(source.kernel, source.module, args) if source.descriptor_types else ()
            )
            compiled[(programs, 1, 1)](*args, *described, *constants, stream=stream_of(device))

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

    if not source.descriptor_types:
        return run
    launch = host_descriptors.stub_of(launch)
    descriptors = host_descriptors.DescriptorCache(source.kernel, source.module, compiled.metadata.tensordesc_meta)

    def run_described(programs: int, args: Sequence[int]) -> None:
        if programs > 0:
            run(programs, [*args, *descriptors(args)])

    return run_described
