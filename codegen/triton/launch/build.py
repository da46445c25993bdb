"""Build: a generated file as something to launch, at the least cost per launch.

What enters is a kernel and its source; what leaves is a launcher.  Everything that can be known before a launch is:
the kernel is compiled for types and alignments that it promises, the grid is computed, constants are laid out.  What
is left is one call, which gives addresses to the driver (`launchers`, `direct`).  A launcher serves every device of the
process, loads the binary on the first launch there, and may be called from several threads.

With symbolic sizes there is one binary per set of sizes that are multiples of 16, of those of which that matters
(`multiples`), compiled when first needed.  So is one without promises on pointers, for tensors that do not start at a
multiple of 16 bytes, such as `x[1:]`, and one with indices of 64 bits, for sizes with which 32 are too few.
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
from fusion.codegen.triton.launch import interpreted, passed
from fusion.codegen.triton.launch.aot import compile_for
from fusion.codegen.triton.launch.beginning import begin
from fusion.codegen.triton.launch.counters import Run, counted
from fusion.codegen.triton.launch.direct import Binary, loaded, run_of
from fusion.codegen.triton.launch.launchers import Either, Wanted, launcher
from fusion.codegen.triton.launch.load import Generated, load, signature
from fusion.codegen.triton.launch.sources import Sources
from fusion.lowering.errors import BuildError
from fusion.lowering.kernel import Kernel

# Its launching stub takes its arguments in the order below; that of other versions is reached through its owner.
_KNOWN_STUB = triton.__version__.startswith("3.6.")


def build(kernel: Kernel, source: str, emit: Callable[..., str]) -> Launcher:
    """Compile `source` for the current device and return what launches it.

    `emit` makes the source for tensors that are not aligned, where `source` cannot serve them, and, with `wide=True`,
    for sizes that it does not take.  Under `TRITON_INTERPRET=1` the launcher interprets, and takes CPU tensors.

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
        compiled = ready.compiled(Wanted(torch.cuda.current_device()))
        if not _is_plain(generated):
            _make_stub(compiled)
    return Either(lambda refused: launcher(ready, kernel, refused, near=generated.near))


class _Ready:
    """The binaries of one kernel, by what they are wanted for."""

    def __init__(self, generated: Generated, emit: Callable[..., str]) -> None:
        self.sources = Sources(generated, emit)
        self._compiled: dict[Wanted, Any] = {}
        self._runs: dict[Wanted, tuple[Run, Binary | None]] = {}
        self._lock = threading.RLock()

    def wide(self, aligned: bool, sizes: Sequence[int]) -> bool:
        """Are these sizes beyond what the kernel is generated for as a rule?"""
        return self.sources.wide(aligned, sizes)

    def compiled(self, wanted: Wanted) -> Any:
        """The binary for a device, which need not be the current one."""
        with self._lock:
            if wanted not in self._compiled:
                source, device = self.sources.of(wanted.aligned, wanted.wide), device_at(wanted.device)
                self._compiled[wanted] = compile_for(source, device, wanted.multiples, aligned=wanted.aligned)
            return self._compiled[wanted]

    def run(self, wanted: Wanted) -> tuple[Run, Binary | None]:
        """What launches on a device, once it is loaded, and the binary if tensors and sizes are all that it takes."""
        with self._lock, torch.cuda.device(wanted.device):
            if wanted not in self._runs:
                compiled, source = self.compiled(wanted), self.sources.of(wanted.aligned, wanted.wide)
                begin().driving.join()  # else the driver may be built twice
                try:
                    run, binary = _run(compiled, wanted.device, source)
                    if source.counted:
                        run, found = counted(run, wanted.device, source.counters)
                        binary = None if binary is None else replace(binary, counters=found)
                    self._runs[wanted] = run, binary
                except Exception as error:
                    raise BuildError(f"{source.kernel.name} cannot be loaded: {error}") from error
            return self._runs[wanted]

    def programs(self, wanted: Wanted, sizes: Sequence[int]) -> int:
        """The number of programs; of persistent ones no more than run at once on the device."""
        source = self.sources.of(wanted.aligned, wanted.wide)
        if not source.persistent:
            return source.grid(*sizes)
        return source.grid(*sizes, processors=torch.cuda.get_device_properties(wanted.device).multi_processor_count)


def _is_plain(source: Generated) -> bool:
    """Are addresses and sizes all that a launch passes?"""
    return not source.passed and not any(param.number for param in source.kernel.params)


def _make_stub(compiled: Any) -> None:
    """Have Triton compile what passes the arguments of `compiled`, in C for each number of them: 0.27 s that its first
    launch would take.
    """
    begin().driving.join()
    with suppress(Exception):  # the launch says what is wrong
        driver.active.launcher_cls(compiled.src, compiled.metadata)


def _run(compiled: Any, device: int, source: Generated) -> tuple[Run, Binary | None]:
    """The cheapest way to launch `compiled`, and the binary if addresses and sizes are all that it takes."""
    native: Any = torch._C._dynamo.guards  # declares less than it has
    empty: Callable[..., torch.Tensor] = native._empty_strided_cuda  # on the current device, in less time than others

    def allocate(size: int, alignment: int = 16, stream: int | None = None) -> torch.Tensor:
        # Freed in stream order: by the time the memory is used again, the kernel is done with it.
        return empty((size,), (1,), torch.int8)

    given = len(signature(source)) - len(source.constants)
    binary = loaded(compiled, device, given) if _is_plain(source) else None
    if binary is not None:
        return run_of(binary, allocate), None if binary.scratch else binary
    return _run_of_triton(compiled, device, source, allocate), None


def _run_of_triton(compiled: Any, device: int, source: Generated, allocate: Callable[..., torch.Tensor]) -> Run:
    """The cheapest way that this version of Triton has."""
    stream_of = torch._C._cuda_getCurrentRawStream
    owner, constants = compiled.run, tuple(source.constants.values())  # `run` loads the binary
    scratch = getattr(compiled.metadata, "global_scratch_size", 0)

    def run_through_owner(programs: int, args: Sequence[int]) -> None:
        if scratch:
            triton.set_allocator(allocate)
        if programs > 0:
            described = passed.made_of(source.kernel, source.module, args) if source.passed else ()
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

    if not source.passed:
        return run
    launch = passed.stub_of(launch)
    descriptors = passed.Kept(source.kernel, source.module, compiled.metadata.tensordesc_meta)

    def run_described(programs: int, args: Sequence[int]) -> None:
        if programs > 0:
            run(programs, [*args, *descriptors(args)])

    return run_described
