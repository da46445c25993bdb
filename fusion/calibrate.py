"""Measures the device at hand, so that prices are those of this machine: `fusion calibrate`.

Input: a device; output: its figures, kept in the cache directory, where the target finds them.  Kernels are measured as
they are generated, and the library's GEMMs as PyTorch calls them: the launch, the bandwidth of each level of memory,
the rate of additions, and the rate of GEMMs by dtype.  It takes less than a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

import fusion
from fusion.codegen import calibration
from fusion.codegen.c.build import cpu_identity
from fusion.codegen.c.device import EPYC
from fusion.codegen.tuning.timing import median_time

Figures: TypeAlias = "dict[str, Any]"

CPU_SIZES = tuple(1 << k for k in range(16, 28))
"""Bytes that one core touches in a measured sum of two tensors."""
GEMM_ROWS: dict[str, int] = {"cpu": 1024, "cuda": 8192}
"""Rows, columns and terms of a measured GEMM of 16-bit floats; wider elements take fewer."""
CHAINS, LENGTH = 8, 8
"""Independent chains of dependent multiply-adds for each element of a kernel that arithmetic bounds."""
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def calibrate(device: str) -> tuple[Figures, Path]:
    """Measure a device ("cpu" or "cuda") and keep its figures; return them with their file."""
    place = torch.device(device)
    if device == "cpu":
        threads = torch.get_num_threads()
        return (figures := _cpu(place, threads)), calibration.keep(figures, cpu_identity(), threads)
    name = torch.cuda.get_device_name()
    return (figures := _gpu(place, name)), calibration.keep(figures, name)


def lines(figures: Figures, path: Path) -> Iterator[str]:
    """Yield the figures as text."""
    yield f"{figures['name']}: launch {figures['launch_us']:.1f} µs, {figures['flops'] / 1e3:.1f} G additions a second"
    for touched, speed in figures["memory"]:
        yield f"  memory of {touched / 1e3:10.0f} kB: {speed / 1e3:8.1f} GB/s"
    rate = figures["matrix_flops"]
    gemms = (f"{8 * int(size)} bits {rate * share / 1e6:.2f}" for size, share in figures["matrix_share"].items())
    yield f"  GEMMs, T operations a second: {', '.join(gemms)}"
    yield f"kept in {path}"


def _cpu(place: torch.device, threads: int) -> Figures:
    """Measure a CPU; the figures but the launch are those of one core."""
    launch = _time(_add, _tensors(64, place))
    memory = []
    for touched in CPU_SIZES:
        count = touched * threads // 12
        took = max(_time(_add, _tensors(count, place)) - launch, 1e-3)
        memory.append((float(touched), 12 * count / took / threads))
    chained = _tensors(threads << 15, place)[:1]
    additions = 2 * CHAINS * LENGTH * chained[0].numel() / max(_time(_chain, chained) - launch, 1e-3)
    gemms = {size: rate / threads for size, rate in _gemms(place).items()}
    return _figures(cpu_name(), launch, _falling(memory), additions / threads, gemms) | {"chained": _chained(gemms)}


def _chained(gemms: dict[int, float]) -> float:
    """Return the factor of generated chains, relative to the library's GEMMs: these grow with units that loops lack."""
    return min(1.0, EPYC.core_matrix_flops / gemms[4])


def _gpu(place: torch.device, name: str) -> Figures:
    """Measure a GPU."""
    launch = _time(_add, _tensors(64, place))
    count = 1 << 27
    bandwidth = 12 * count / (_time(_add, _tensors(count, place)) - launch)
    chained = _tensors(1 << 24, place)[:1]
    took = _time(_chain, chained) - launch
    return _figures(
        name, launch, [(12.0 * count, bandwidth)], 2 * CHAINS * LENGTH * chained[0].numel() / took, _gemms(place)
    )


def _figures(
    name: str, launch: float, memory: Sequence[tuple[float, float]], additions: float, gemms: dict[int, float]
) -> Figures:
    shares = {1: 2.0, **{size: rate / gemms[2] for size, rate in gemms.items()}}
    return {
        "name": name,
        "launch_us": launch,
        "memory": memory,
        "flops": additions,
        "matrix_flops": gemms[2],
        "matrix_share": shares,
    }


def _falling(memory: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of a curve that only falls: short launches do not reach the bandwidth of their cache."""
    best = max(range(len(memory)), key=lambda k: memory[k][1])
    falling = [memory[best]]
    for touched, speed in memory[best + 1 :]:
        falling.append((touched, min(speed, falling[-1][1])))
    return falling


def _gemms(place: torch.device) -> dict[int, float]:
    """Return the library's operations per microsecond, for each size of an element."""
    rates = {}
    for dtype in DTYPES:
        rows = GEMM_ROWS[place.type] * 2 // max(2, dtype.itemsize)
        left, right = (torch.randn(rows, rows, device=place).to(dtype) for _ in range(2))
        torch.mm(left, right)
        rates[dtype.itemsize] = 2 * rows**3 / median_time(partial(torch.mm, left, right), place)
    return rates


def _tensors(count: int, place: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(count, device=place), torch.rand(count, device=place)


def _add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def _chain(x: torch.Tensor) -> torch.Tensor:
    return sum((_powers(x, float(chain)) for chain in range(CHAINS)), torch.zeros_like(x))


def _powers(x: torch.Tensor, start: float) -> torch.Tensor:
    result = x + start
    for _ in range(LENGTH):
        result = result * x + 0.5
    return result


def _time(function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> float:
    """Return the microseconds of the one kernel of a function."""
    torch._dynamo.reset()
    (kernel,) = fusion.explain(function, measure=True, dynamic=False)(*inputs).kernels
    assert kernel.measured is not None, "a kernel that was compiled is measured"
    return kernel.measured


def cpu_name() -> str:
    """Return the name of the CPU, as far as the system tells it."""
    names = (line.partition(":")[2].strip() for line in cpu_identity().splitlines() if line.startswith("model name"))
    return next(names, "CPU")


__all__ = ["calibrate", "lines"]
