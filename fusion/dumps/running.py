"""Runs a dumped file of a kernel: builds the source in it, checks its results, and measures it.

Input: the file with its inputs; output: lines on standard output, and the exit code 1 if the kernel is wrong.  Kernels
in C are built by the system's compiler, kernels in Triton for the GPU at hand; without one they run under Triton's
interpreter, which checks numbers but says nothing about speed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from fusion.codegen.build import is_idle
from fusion.codegen.target import Launcher
from fusion.codegen.targets import TARGETS
from fusion.codegen.tuning.timing import median_time
from fusion.dumps.checks import Case
from fusion.dumps.inputs import Draw
from fusion.dumps.kernel_files import KernelFile, read_kernel_file
from fusion.inspect.accuracy import copied
from fusion.inspect.graphs import DeviceReport
from fusion.lowering.errors import BuildError

Inputs = Callable[[Draw], Sequence[torch.Tensor]]

CPU = torch.device("cpu")


def built(file: KernelFile) -> Launcher:
    """Build the source in a file.

    Raises:
        BuildError: with the message of the tool that refuses it.
    """
    if is_idle(file.kernel):
        return lambda *args: None
    return TARGETS[file.target](None, file.numerics).build(file.kernel, file.source)


def device_for(target: str) -> torch.device:
    """Return the device on which kernels of a target run here."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if target == "c" or interpreted or not torch.cuda.is_available():
        return CPU
    return torch.device("cuda", torch.cuda.current_device())


def run_kernel(file: str, inputs: Inputs, sizes: Sequence[int], moved: int, operations: int) -> None:
    """Check and measure the kernel in a file; print the result.

    Args:
        file: the path of the file.
        inputs: makes the tensors of a launch.
        sizes: the values of the kernel's sizes.
        moved: bytes that one launch moves if it touches each tensor once.
        operations: arithmetic of one launch, in additions.

    Raises:
        FusionError: no inputs can be drawn.
        SystemExit: with code 1, if the source cannot be built, with the message of the tool, or the numbers are wrong.
    """
    known = read_kernel_file(Path(file))
    device = device_for(known.target)
    print(f"{known.kernel.name}, target {known.target}, on {_place(known.target, device)}")
    try:
        launch = built(known)
    except BuildError as error:
        raise SystemExit(f"the source cannot be built: {error}") from error
    case = Case.of(known.kernel, inputs, sizes, device)
    results = case.run(launch)
    for result in results:
        print(f"  {result}")
    took, allowed = _launch_time(case, launch, device), _allowed(known, device, moved, operations)
    print(f"  {_speed(took, moved, operations, allowed)}")
    if not all(result.is_right for result in results):
        raise SystemExit(1)


def _place(target: str, device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if target == "triton":
        return "Triton's interpreter, which says nothing about speed"
    count = torch.get_num_threads()
    return f"the CPU, {count} thread{'' if count == 1 else 's'}"


def _launch_time(case: Case, launch: Launcher, device: torch.device) -> float:
    """Return the microseconds of a launch; updated tensors are restored before each."""
    tensors = [copied(tensor, tensor.dtype) for tensor in case.tensors]
    updated = [
        (ours, given) for p, ours, given in zip(case.kernel.params, tensors, case.tensors, strict=True) if p.written
    ]

    def restore() -> None:
        for ours, given in updated:
            ours.copy_(given)

    call = partial(launch, *tensors, *case.sizes)
    if device.type == "cpu" and launch.__module__.endswith(".interpreted"):
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    return median_time(call, device, restore if updated else None)


def _allowed(file: KernelFile, device: torch.device, moved: int, operations: int) -> float:
    """Return the microseconds that memory and arithmetic of the device allow; 0 of an interpreter."""
    if file.target == "triton" and device.type == "cpu":
        return 0.0
    return DeviceReport.of(TARGETS[file.target](None, file.numerics)).allows(moved, operations)


def _speed(microseconds: float, moved: int, operations: int, allowed: float) -> str:
    """Return a time with the rates that follow from it, against the time that the device allows, if that is known.

    >>> _speed(2000.0, 4_000_000, 1_000_000, 500.0)
    '2000.0 µs a launch: 2.00 GB/s, 0.50 GFLOP/s; 25% of the roof, at which it takes 500.0 µs'
    """
    rates = moved / microseconds / 1e3, operations / microseconds / 1e3
    roof = f"; {allowed / microseconds:.0%} of the roof, at which it takes {allowed:.1f} µs" if allowed else ""
    return f"{microseconds:.1f} µs a launch: {rates[0]:.2f} GB/s, {rates[1]:.2f} GFLOP/s{roof}"


__all__ = ["built", "device_for", "run_kernel"]
