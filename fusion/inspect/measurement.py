"""Measures the time of each kernel and library call in its place in a call, on the tensors that it gets there.

Input: steps as they run; output: microseconds in the graphs' reports.  A step runs once as the program asks, then again
under the clock: on a CPU by wall-clock time, on a GPU between events with a cold L2 cache (`tuning/timing.py`).  Memory
that a launch reads and writes is cloned for the repeated runs, and restored before each: the program continues from the
state after one run.  A step that runs several times with equal sizes is measured the first time.

A library call that draws random numbers or changes its operands runs once, and is timed then.  Calls of operations
outside ATen are not measured: they may have effects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TypeAlias, cast

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusion.codegen.tuning.timing import median_time
from fusion.inspect.report import Report, steps_of
from fusion.inspect.watch import Watch
from fusion.lowering.ir.kernel import Kernel, only_stored
from fusion.lowering.ir.program import Extern
from fusion.operations.products import aligned_product
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall

Key: TypeAlias = tuple[object, ...]
Restore: TypeAlias = "Callable[[], object] | None"
Clock: TypeAlias = "Callable[[Callable[[], object], torch.device, Restore], float]"
"""Returns the median microseconds of a call on a device; the third argument runs before each call, untimed."""


@dataclass(slots=True)
class _Times:
    """The runs of one step: the time for each size (None where it could not be measured), and of each run."""

    step: KernelCall | Extern
    known: dict[Key, float | None] = field(default_factory=dict)
    took: list[float | None] = field(default_factory=list)

    def ran(self, key: Key, measure: Callable[[], float]) -> None:
        """Add a run, which is measured if there was none with these sizes; without memory for it, it has no time."""
        if key not in self.known:
            self.known[key] = None
            with suppress(torch.OutOfMemoryError):
                self.known[key] = measure()
        self.took.append(self.known[key])

    @property
    def mean(self) -> float | None:
        """The mean time of a run; None if a run has none."""
        took = [each for each in self.took if each is not None]
        return fmean(took) if took and len(took) == len(self.took) else None


class Measurement(Watch):
    """A `Watch` that measures every step by `clock` (`median_time`), and adds the times to reports."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or median_time
        self._times: dict[int, _Times] = {}  # id of a step, which its times hold → times
        self._described: list[tuple[Report, Schedule]] = []

    def __call__(self, step: KernelCall | Extern, run: Callable[..., object]) -> Callable[..., object]:
        """Return `run` under the clock."""
        if isinstance(step, Extern) and not _is_measured(step):
            return run
        times = self._times[id(step)] = _Times(step)
        if isinstance(step, KernelCall):
            return partial(self._launched, step.kernel, run, times)
        return partial(_called_once, run, times) if step.impure else partial(self._called, run, times)

    def launch_time(
        self, kernel: Kernel, run: Callable[[], object], operands: Sequence[torch.Tensor], restore: Restore
    ) -> float:
        """Return the microseconds of a launch on `operands`; `restore` undoes the changes of a run to them."""
        return self._clock(run, _device_of(operands), restore)

    def _launched(self, kernel: Kernel, launch: Callable[..., object], times: _Times, *args: object) -> None:
        """Launch a kernel, and measure it on its tensors; updated tensors are cloned."""
        count = len(kernel.params)
        tensors, sizes = cast("Sequence[torch.Tensor]", args[:count]), args[count:]
        before: dict[int, torch.Tensor] = {}
        if sizes not in times.known:
            try:
                before = _updated_memory(kernel, tensors)
            except torch.OutOfMemoryError:
                times.known[sizes] = None
        launch(*args)

        def measure() -> float:
            operands, restore = _repeatable(tensors, before)
            return self.launch_time(kernel, partial(launch, *operands, *sizes), operands, restore)

        times.ran(sizes, measure)

    def _called(self, run: Callable[..., object], times: _Times, *args: object, **kwargs: object) -> object:
        """Call the library, then repeat the call to measure it."""
        result = run(*args, **kwargs)
        key, device = _described((args, kwargs), result)
        times.ran(key, partial(self._clock, partial(run, *args, **kwargs), device, None))
        return result

    def compiled(self, report: Report, schedule: Schedule) -> None:
        """Record the schedule that a report describes."""
        self._described.append((report, schedule))

    def measured(self, reports: Sequence[Report]) -> tuple[Report, ...]:
        """Return reports with the times that were measured: the mean over all runs, times the runs in one call."""
        took: dict[int, float] = {}  # id of an entry of a report → microseconds
        for report, schedule in self._described:
            steps = [(step, runs) for _, step, runs in steps_of(schedule)]
            launches = [(step, runs) for step, runs in steps if isinstance(step, KernelCall)]
            calls = [(step, runs) for step, runs in steps if isinstance(step, Extern) and not step.is_view]
            pairs = [*zip(report.kernels, launches, strict=True), *zip(report.externs, calls, strict=True)]
            for entry, (step, runs) in pairs:
                times = self._times.get(id(step))
                if times is not None and times.mean is not None:
                    took[id(entry)] = times.mean * runs
        return tuple(_with_times(report, took) for report in reports)


def _with_times(report: Report, took: Mapping[int, float]) -> Report:
    """Return a report whose entries have the times `took`, by id: entries outlive the reports around them."""
    kernels = tuple(replace(kernel, measured=took.get(id(kernel))) for kernel in report.kernels)
    externs = tuple(replace(extern, measured=took.get(id(extern))) for extern in report.externs)
    return replace(report, kernels=kernels, externs=externs)


def _is_measured(call: Extern) -> bool:
    """Return whether a call has only the effects that its operation declares."""
    is_aten = isinstance(call.target, OpOverload) and call.target.namespace == "aten"
    return is_aten or call.target is aligned_product


def _repeatable(
    tensors: Sequence[torch.Tensor], before: Mapping[int, torch.Tensor]
) -> tuple[list[torch.Tensor], Restore]:
    """Return the operands of repeated launches, and the function that restores them.

    `before` has the contents of the memory that a launch updates, by address: it is cloned.
    """
    scratch = {address: memory.clone() for address, memory in before.items()}

    def restore() -> None:
        for address, memory in before.items():
            scratch[address].copy_(memory)

    return [_within(scratch.get(_address(tensor)), tensor) for tensor in tensors], restore if before else None


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return the device on which a step with these tensors runs: not the CPU if one of them is elsewhere."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))


def _updated_memory(kernel: Kernel, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return clones of the memory that a launch both reads and writes, by address."""
    unread = only_stored(kernel)
    pairs = list(zip(kernel.params, tensors, strict=True))
    written = {_address(tensor) for param, tensor in pairs if param.written}
    read = {_address(tensor) for param, tensor in pairs if param.name not in unread}
    memory = {_address(tensor): tensor for tensor in tensors if _address(tensor) in written & read}
    return {address: _flat(tensor).clone() for address, tensor in memory.items()}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _within(memory: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor at the same place in other memory; the tensor itself without."""
    if memory is None:
        return tensor
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory.untyped_storage(), *place)


def _called_once(run: Callable[..., object], times: _Times, *args: object, **kwargs: object) -> object:
    """Call the library under the clock."""
    _, device = _described((args, kwargs), None)
    _wait_for(device)
    start = time.perf_counter()
    result = run(*args, **kwargs)
    _wait_for(device)
    times.took.append((time.perf_counter() - start) * 1e6)
    return result


def _described(arguments: object, result: object) -> tuple[Key, torch.device]:
    """Return the shapes of a call, and the device on which it runs."""
    leaves = [leaf for leaf in pytree.tree_leaves((arguments, result)) if isinstance(leaf, torch.Tensor)]
    return tuple((leaf.shape, leaf.stride()) for leaf in leaves), _device_of(leaves)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
