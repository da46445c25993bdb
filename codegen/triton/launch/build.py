"""Build: a generated file as something to launch, at the least cost per launch.

What enters is a kernel and its source; what leaves is a launcher.  Everything that can be known before a launch is:
the kernel is compiled for types and alignments that it promises, the grid is computed, constants are laid out.  What
is left is one call into Triton's launching stub with raw pointers and the current stream.  A launcher serves every
device of the process, loads the binary on the first launch there, and may be called from several threads.

With symbolic sizes there is one binary per set of sizes that are multiples of 16, of those of which that matters
(`multiples`), compiled when first needed.  So is
one without promises on pointers, for tensors that do not start at a multiple of 16 bytes, such as `x[1:]`, and one with
indices of 64 bits, for sizes with which 32 are too few.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any, TypeAlias

import torch
import triton
from triton.runtime.jit import JITFunction

from codegen.target import Launcher, Refused
from codegen.triton.arguments import on_device
from codegen.triton.launch import interpreted, passed
from codegen.triton.launch.aot import compile_for, target_of
from codegen.triton.launch.beginning import begin
from codegen.triton.launch.counters import Run, counted
from codegen.triton.launch.load import Generated, load
from codegen.triton.launch.multiples import ALIGNED, telling
from codegen.triton.launch.present import arch_at
from codegen.triton.products.stacked import NEAR
from lowering.errors import BuildError
from lowering.kernel import Kernel, Param

# Its launching stub takes its arguments in the order below; that of other versions is reached through its owner.
_KNOWN_STUB = triton.__version__.startswith("3.6.")


def build(kernel: Kernel, source: str, emit: Callable[..., str]) -> Launcher:
    """Compile `source` for the current device and return what launches it.

    `emit` makes the source for tensors that are not aligned, where `source` cannot serve them because it uses tensor
    descriptors, and, with `wide=True`, for sizes that it does not take.  Under `TRITON_INTERPRET=1` the launcher
    interprets, and takes CPU tensors.

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
    ready = _Ready(generated, emit)
    if kernel.sizes:
        return _dynamic_launcher(ready, kernel, near=generated.near)
    ready.compiled(torch.cuda.current_device(), True, False, ())
    return _static_launcher(ready, kernel, near=generated.near)


def promise(params: Sequence[Param], *, near: bool = False) -> Callable[[Sequence[int]], bool]:
    """Says of the pointers of a launch whether all that should be multiples of 16 are; and `near` each other."""
    tensors = [position for position, param in enumerate(params) if not param.number]
    if len(tensors) < len(params):
        check = promise([params[position] for position in tensors], near=near)
        return lambda given: check([given[position] for position in tensors])
    promised = [position for position, param in enumerate(params) if param.aligned]

    def kept(pointers: Sequence[int]) -> bool:
        return not reduce(or_, pointers, 0) & 15 or not any(pointers[position] & 15 for position in promised)

    def kept_near(pointers: Sequence[int]) -> bool:
        return kept(pointers) and max(pointers) - min(pointers) < NEAR

    return kept_near if near else kept


def _values_of(params: Sequence[Param]) -> Callable[[Sequence[torch.Tensor]], list[Any]]:
    """Gives what is passed for tensors of these parameters, of which some are numbers."""
    takes = [torch.Tensor.item if param.number else torch.Tensor.data_ptr for param in params]
    return lambda tensors: [take(tensor) for take, tensor in zip(takes, tensors, strict=True)]


Wanted: TypeAlias = "tuple[int, bool, bool, tuple[bool, ...]]"
"""The device, are pointers as promised, are indices 64 bits wide, which sizes are multiples of 16."""


class _Ready:
    """The binaries of one kernel, by device, by whether pointers are as promised, by whether sizes are beyond what the
    given source takes, and by which sizes are multiples of 16.
    """

    def __init__(self, generated: Generated, emit: Callable[..., str]) -> None:
        self._sources, self._emit = {(True, False): generated}, emit
        self._compiled: dict[Wanted, Any] = {}
        self._runs: dict[Wanted, Run] = {}
        self._lock = threading.RLock()

    def source(self, aligned: bool, wide: bool = False) -> Generated:
        """What is compiled for pointers that are or are not as promised, and for any sizes or for most."""
        with self._lock:
            if (aligned, wide) not in self._sources:
                promised = self._sources[True, False]
                kernel = promised.kernel if aligned else unaligned(promised.kernel)
                same = not wide and not promised.described
                self._sources[aligned, wide] = promised if same else load(kernel, self._emit(kernel, wide=wide))
            return self._sources[aligned, wide]

    def wide(self, aligned: bool, sizes: Sequence[int]) -> bool:
        """Are these sizes beyond what the kernel is generated for as a rule?"""
        return not self.source(aligned).fits(*sizes)

    def compiled(self, device: int, aligned: bool, wide: bool, multiples: tuple[bool, ...]) -> Any:
        """The binary for `device`, which need not be the current one."""
        with self._lock:
            key = (device, aligned, wide, multiples)
            if key not in self._compiled:
                target = target_of(arch_at(device))
                self._compiled[key] = compile_for(self.source(aligned, wide), target, multiples, aligned=aligned)
            return self._compiled[key]

    def run(self, device: int, aligned: bool, wide: bool = False, multiples: tuple[bool, ...] = ()) -> Run:
        """What launches on `device`; loads the binary."""
        with self._lock, torch.cuda.device(device):
            key = (device, aligned, wide, multiples)
            if key not in self._runs:
                compiled, source = self.compiled(*key), self.source(aligned, wide)
                begin().driving.join()  # else the driver may be built twice
                try:
                    run = _run(compiled, device, source)
                    self._runs[key] = counted(run, device, source.counters) if source.counted else run
                except Exception as error:
                    raise BuildError(f"{source.kernel.name} cannot be loaded: {error}") from error
            return self._runs[key]

    def programs(self, device: int, aligned: bool, wide: bool = False, sizes: Sequence[int] = ()) -> int:
        """The number of programs; of persistent ones no more than run at once on `device`."""
        source = self.source(aligned, wide)
        if not source.persistent:
            return source.grid(*sizes)
        return source.grid(*sizes, processors=torch.cuda.get_device_properties(device).multi_processor_count)


def unaligned(kernel: Kernel) -> Kernel:
    """`kernel`, and what shares its launch, without promises on pointers."""
    params = tuple(replace(param, aligned=False) for param in kernel.params)
    others = tuple(map(unaligned, kernel.beside))
    return replace(kernel, params=params, beside=others, then=None if kernel.then is None else unaligned(kernel.then))


def _run(compiled: Any, device: int, source: Generated) -> Run:
    """The cheapest way to launch `compiled` that this version of Triton has."""
    stream_of = torch._C._cuda_getCurrentRawStream
    owner, constants = compiled.run, tuple(source.constants.values())  # `run` loads the binary
    scratch = getattr(compiled.metadata, "global_scratch_size", 0)

    native: Any = torch._C._dynamo.guards  # declares less than it has
    empty: Callable[..., torch.Tensor] = native._empty_strided_cuda  # on the current device, in less time than others

    def allocate(size: int, alignment: int = 16, stream: int | None = None) -> torch.Tensor:
        # Freed in stream order: by the time the memory is used again, the kernel is done with it.
        return empty((size,), (1,), torch.int8)

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


def _static_launcher(ready: _Ready, kernel: Kernel, *, near: bool = False, refused: Refused | None = None) -> Launcher:
    runs: dict[tuple[int, bool], tuple[Run, int]] = {}
    current, kept = torch._C._cuda_getDevice, promise(kernel.params, near=near)
    at, plain, values = on_device(kernel), not any(param.number for param in kernel.params), _values_of(kernel.params)

    def first(device: int, aligned: bool) -> tuple[Run, int]:
        runs[device, aligned] = ready.run(device, aligned), ready.programs(device, aligned)
        return runs[device, aligned]

    def launch(*tensors: torch.Tensor) -> None:
        device = tensors[at].get_device()
        pointers = [tensor.data_ptr() for tensor in tensors] if plain else values(tensors)
        aligned = kept(pointers)
        found = runs.get((device, aligned))
        if found is None:
            try:
                found = first(device, aligned)
            except BuildError as refusal:
                if refused is None:
                    raise
                return refused(refusal, tensors)
        run, programs = found
        if device == current():
            run(programs, pointers)
        else:
            with torch.cuda.device(device):
                run(programs, pointers)

    launch.or_else = lambda refused: _static_launcher(ready, kernel, near=near, refused=refused)  # type: ignore[attr-defined]
    return launch


MOST_SIZES = 4096
"""Sets of sizes for which a launcher remembers what it launches."""


def _dynamic_launcher(ready: _Ready, kernel: Kernel, *, near: bool = False, refused: Refused | None = None) -> Launcher:
    runs: dict[Wanted, Run] = {}
    known: dict[tuple[int, ...], tuple[Run, int]] = {}  # sizes that were there before cost no more than fixed ones
    current, kept = torch._C._cuda_getDevice, promise(kernel.params, near=near)
    count, told = len(kernel.params), telling(kernel)
    at, plain, values = on_device(kernel), not any(param.number for param in kernel.params), _values_of(kernel.params)

    def first(device: int, aligned: bool, sizes: tuple[int, ...]) -> tuple[Run, int]:
        wide = ready.wide(aligned, sizes)
        key = (
            device,
            aligned,
            wide,
            tuple([tells and size % ALIGNED == 0 for tells, size in zip(told, sizes, strict=True)]),
        )
        if key not in runs:
            runs[key] = ready.run(*key)
        if len(known) >= MOST_SIZES:
            known.clear()
        asked = (device, aligned, *sizes)
        known[asked] = runs[key], ready.programs(device, aligned, wide, sizes)
        return known[asked]

    def launch(*args: Any) -> None:
        device, sizes = args[at].get_device(), args[count:]
        pointers = [tensor.data_ptr() for tensor in args[:count]] if plain else values(args[:count])
        aligned = kept(pointers)
        found = known.get((device, aligned, *sizes))
        if found is None:
            try:
                found = first(device, aligned, sizes)
            except BuildError as refusal:
                if refused is None:
                    raise
                return refused(refusal, args)
        run, programs = found
        if device == current():
            run(programs, [*pointers, *sizes])
        else:
            with torch.cuda.device(device):
                run(programs, [*pointers, *sizes])

    launch.or_else = lambda refused: _dynamic_launcher(ready, kernel, near=near, refused=refused)  # type: ignore[attr-defined]
    return launch
