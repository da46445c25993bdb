"""Measures the device at hand, so that prices are predicted for this machine: `fusion calibrate`.

Input: a device; output: its figures, kept in the cache directory, where the target finds them.  Kernels are measured as
they are generated, and the library's GEMMs as PyTorch calls them: the launch, the bandwidth of each level of memory,
the rate of additions, and the rate of GEMMs by dtype.  It takes less than a minute.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

import fusion
from fusion.backend import Backend
from fusion.codegen import calibration
from fusion.codegen.c.build import cpu_identity
from fusion.codegen.calibration import DeviceSpeeds
from fusion.codegen.tuning.timing import median_time
from fusion.lowering.errors import FusionError, FusionWarning
from fusion.options import Options
from fusion.schedule.overrides import ONE_KERNEL, Overrides

CPU_SIZES = tuple(1 << k for k in range(16, 28))
"""Bytes that one core touches in a measured sum of two tensors."""
ROUNDS, FURTHER_ROUNDS = 3, 6
"""Rounds in which all of a CPU is measured; and the most in which those times are that no other round confirms."""
CONFIRMED = 1.05
"""The quotient of the two least times of rounds that confirm each other."""
CLEAR = 3
"""Times a launch that a kernel takes at least, if its bandwidth is to show."""
GPU_COUNT = 1 << 27
"""Elements of a sum of two tensors that is far larger than the caches of a GPU."""
GEMM_ROWS: dict[str, int] = {"cpu": 1024, "cuda": 8192}
"""Rows, columns and terms of a measured GEMM of 16-bit floats; wider elements take fewer."""
CHAINS = 8
LENGTH = 8
"""Independent chains, and dependent multiply-adds in each, for each element of a kernel that arithmetic bounds.

The scheduler splits longer chains into several kernels.  On a GPU memory takes part of the time."""
_Key: TypeAlias = tuple[str, object]
"""What is measured, and of which size or dtype."""
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
LEAST_COST = 1.0
"""Additions: no function counts less, whatever was measured."""
TIMED_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in ("sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p")
    },
    **{name: getattr(torch, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh")},
    **{name: getattr(torch, name) for name in ("asinh", "atanh", "erf", "erfc", "lgamma")},
    "acosh": lambda x: torch.acosh(x + 1.0),
    "maximum": lambda x: torch.maximum(x, torch.full_like(x, 0.5)),
    "minimum": lambda x: torch.minimum(x, torch.full_like(x, 0.5)),
    "truediv": lambda x: 0.5 / x,
    "pow": lambda x: torch.pow(x, x),
    "atan2": lambda x: torch.atan2(x, x + 1.0),
    "remainder": lambda x: torch.remainder(x, 0.3),
    "fmod": lambda x: torch.fmod(x, 0.3),
    "floordiv": lambda x: torch.floor_divide(x, 0.3),
}
"""Operation → a call of it on numbers between 0 and 1."""


def calibrate(device: str) -> tuple[DeviceSpeeds, Path]:
    """Measure a device ("cpu" or "cuda") and keep its figures; return them with their file.

    Raises:
        BuildError: the cache directory cannot be written.
        FusionError: nothing can be compiled here.
    """
    place = torch.device(device)
    if device == "cpu":
        threads = torch.get_num_threads()
        figures = _of_core(cpu_identity(), place, threads)
        return figures, calibration.keep(figures, cpu_identity(), threads)
    figures = _of_gpu(place)
    return figures, calibration.keep(figures, figures.name)


def lines(figures: DeviceSpeeds, path: Path) -> Iterator[str]:
    """Yield the figures as text."""
    yield f"{figures.name}: launch {figures.launch_us:.1f} µs, {figures.flops / 1e3:.1f} G additions a second"
    for touched, speed in figures.memory:
        yield f"  memory of {touched / 1e3:10.0f} kB: {speed / 1e3:8.1f} GB/s"
    gemms = (f"{8 * size} bits {rate / 1e3:,.1f}" for size, rate in figures.gemms.items())
    yield f"  GEMMs, G operations a second: {', '.join(gemms)}"
    shares = (f"{8 * size} bits {share:.2f}" for size, share in figures.products.items())
    if figures.products:
        yield f"  generated GEMMs beside these: {', '.join(shares)}"
    if figures.costs:
        yield f"  in additions: {', '.join(f'{name} {cost:.0f}' for name, cost in figures.costs.items())}"
    yield f"kept in {path}"


def _of_core(identity: str, place: torch.device, threads: int) -> DeviceSpeeds:
    """Measure a CPU; all figures but the launch are per thread.

    Of each time the least of several rounds counts: others that share the machine slow some of them down.
    """
    least = _least(_measurements(place, threads))
    launch = least["launch", ""]
    memory = []
    for touched in CPU_SIZES:
        took = least["sum", touched]
        if took > CLEAR * launch:
            memory.append((float(touched), 12 * (touched * threads // 12) / (took - launch) / threads))
    additions = _additions(1 << 15, least["additions", ""])
    operations = 2 * GEMM_ROWS[place.type] ** 3
    gemms = {each.itemsize: operations / least["library", each] for each in DTYPES}
    products = {each.itemsize: least["library", each] / least["generated", each] for each in DTYPES}
    costs = {name: _cost(least[name, ""] * additions / (1 << 15)) for name in TIMED_FUNCTIONS}
    names = (line.partition(":")[2].strip() for line in identity.splitlines() if line.startswith("model name"))
    return DeviceSpeeds(next(names, "CPU"), launch, _falling(memory), additions, gemms, products, costs)


def _least(measurements: Mapping[_Key, Callable[[], float]]) -> dict[_Key, float]:
    """Return the least of several times of each measurement: of more rounds where only one was undisturbed."""
    times: dict[_Key, list[float]] = {key: [] for key in measurements}
    for each in range(ROUNDS + FURTHER_ROUNDS):
        for key, measure in measurements.items():
            if each < ROUNDS or not _is_confirmed(times[key]):
                times[key].append(measure())
    return {key: min(taken) for key, taken in times.items()}


def _is_confirmed(times: Sequence[float]) -> bool:
    """Return whether the least time is no exception.

    >>> _is_confirmed([7.0, 1.02, 1.0]), _is_confirmed([7.0, 1.0, 1.2])
    (True, False)
    """
    least, second, *_ = sorted(times)
    return second <= CONFIRMED * least


def _measurements(place: torch.device, threads: int) -> dict[_Key, Callable[[], float]]:
    """Return everything that is measured on a CPU, each as a function that returns microseconds.

    Memory is measured with all threads at work, which share it.  Arithmetic is a matter of one core: on one thread the
    clock is that of its own time, to which others that share the machine add nothing.
    """
    x, _ = _tensors(1 << 15, place)
    measurements: dict[_Key, Callable[[], float]] = {("launch", ""): partial(_time, _add, _tensors(64, place))}
    for size in CPU_SIZES:
        measurements["sum", size] = partial(_time, _add, _tensors(size * threads // 12, place))
    measurements["additions", ""] = partial(_on_one_thread, partial(_time, _chain, [x]))
    for dtype in DTYPES:
        for name, product in (("library", _linear), ("generated", _compiled(ONE_KERNEL))):
            measurements[name, dtype] = partial(_on_one_thread, partial(_time_of_product, product, dtype, place))
    for name, function in TIMED_FUNCTIONS.items():
        measurements[name, ""] = partial(_on_one_thread, partial(_time, partial(_sum_of, function), [x]))
    return measurements


def _on_one_thread(measure: Callable[[], float]) -> float:
    """Return what is measured while PyTorch has one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure()
    finally:
        torch.set_num_threads(threads)


def _time_of_product(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype, place: torch.device
) -> float:
    """Return the microseconds of a product of two square matrices."""
    left, right = (torch.randn(GEMM_ROWS[place.type], GEMM_ROWS[place.type]).to(dtype) for _ in range(2))
    product(left, right)
    return median_time(partial(product, left, right), place)


def _of_gpu(place: torch.device) -> DeviceSpeeds:
    launch = _time(_add, _tensors(64, place))
    moved = 12 * GPU_COUNT
    bandwidth = moved / (_time(_add, _tensors(GPU_COUNT, place)) - launch)
    x, _ = _tensors(GPU_COUNT // 8, place)
    additions = _additions(GPU_COUNT // 8, _time(_chain, [x]) - launch)
    gemms = {
        dtype.itemsize: _operations(place, dtype) / median_time(partial(torch.mm, *_squares(place, dtype)), place)
        for dtype in DTYPES
    }
    return DeviceSpeeds(torch.cuda.get_device_name(), launch, ((float(moved), bandwidth),), additions, gemms)


def _additions(count: int, took: float) -> float:
    """Return the additions per microsecond of a kernel over `count` elements that arithmetic bounds."""
    return 2 * CHAINS * LENGTH * count / took


def _cost(additions: float) -> float:
    """Return the cost of a function; with a sum, a product and a difference it takes `additions` in each chain."""
    return max(LEAST_COST, round(additions / CHAINS - 3, 1))


def _falling(memory: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of a curve that only falls: short launches do not reach the bandwidth of their cache."""
    best = max(range(len(memory)), key=lambda k: memory[k][1])
    falling = [memory[best]]
    for touched, speed in memory[best + 1 :]:
        falling.append((touched, min(speed, falling[-1][1])))
    return falling


def _squares(place: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of the measured GEMM, which PyTorch has multiplied once."""
    rows = GEMM_ROWS[place.type] * 2 // max(2, dtype.itemsize)
    left, right = (torch.randn(rows, rows, device=place).to(dtype) for _ in range(2))
    torch.mm(left, right)
    return left, right


def _operations(place: torch.device, dtype: torch.dtype) -> int:
    """Return the operations of the measured GEMM."""
    return 2 * (GEMM_ROWS[place.type] * 2 // max(2, dtype.itemsize)) ** 3


def _linear(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.mm(left, right.t())


def _compiled(way: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    torch._dynamo.reset()
    backend = Backend(Options.read(options={"graph_cache": False}), overrides=Overrides(products=way))
    return torch.compile(_linear, backend=backend, dynamic=False)


def _sum_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return sum((function(x * 0.9 + (1 + chain) / 100) for chain in range(CHAINS)), torch.zeros_like(x))


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusionWarning)  # the error below says the same
        explanation = fusion.explain(function, measure=True, dynamic=False)(*inputs)
    if not explanation.kernels:
        failure = next((graph.failure.partition("\n")[0] for graph in explanation.graphs if graph.failure), "no kernel")
        raise FusionError(f"there is nothing to measure: {failure}", hint="`fusion doctor` says what is missing")
    (kernel,) = explanation.kernels
    assert kernel.measured is not None, "a kernel that was compiled is measured"
    return kernel.measured


__all__ = ["calibrate", "lines"]
