"""Measures the device at hand, so that prices are those of this machine: `fusion calibrate`.

Input: a device; output: its figures, kept in the cache directory, where the target finds them.  Kernels are measured as
they are generated, and the library's GEMMs as PyTorch calls them: the launch, the bandwidth of each level of memory,
the rate of additions, and the rate of GEMMs by dtype.  It takes less than a minute.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

import fusion
from fusion.backend import Backend
from fusion.codegen import calibration
from fusion.codegen.c.build import cpu_identity
from fusion.codegen.calibration import Figures
from fusion.codegen.tuning.timing import median_time
from fusion.lowering.errors import FusionError, FusionWarning
from fusion.options import Options
from fusion.schedule.overrides import ONE_KERNEL, Overrides

CPU_SIZES = tuple(1 << k for k in range(16, 28))
"""Bytes that one core touches in a measured sum of two tensors."""
CLEAR = 3
"""Times a launch that a kernel takes at least, if its bandwidth is to show."""
GPU_COUNT = 1 << 27
"""Elements of a sum of two tensors that is far larger than the caches of a GPU."""
GEMM_ROWS: dict[str, int] = {"cpu": 1024, "cuda": 8192}
"""Rows, columns and terms of a measured GEMM of 16-bit floats; wider elements take fewer."""
CHAINS = 8
LENGTH = 8
"""Independent chains of so many dependent multiply-adds for each element of a kernel that arithmetic bounds.

Of longer ones the scheduler makes several kernels.  On a GPU memory takes part of the time."""
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
LEAST_COST = 1.0
"""Additions: no function counts less, whatever was measured."""
FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in ("sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p")
    },
    **{name: getattr(torch, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh")},
    **{name: getattr(torch, name) for name in ("asinh", "atanh", "erf", "erfc", "lgamma")},
    "acosh": lambda x: torch.acosh(x + 1.0),
    "truediv": lambda x: 0.5 / x,
    "pow": lambda x: torch.pow(x, x),
    "atan2": lambda x: torch.atan2(x, x + 1.0),
    "remainder": lambda x: torch.remainder(x, 0.3),
    "fmod": lambda x: torch.fmod(x, 0.3),
    "floordiv": lambda x: torch.floor_divide(x, 0.3),
}
"""Operation → a call of it on numbers between 0 and 1."""


def calibrate(device: str) -> tuple[Figures, Path]:
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


def lines(figures: Figures, path: Path) -> Iterator[str]:
    """Yield the figures as text."""
    yield f"{figures.name}: launch {figures.launch_us:.1f} µs, {figures.flops / 1e3:.1f} G additions a second"
    for touched, speed in figures.memory:
        yield f"  memory of {touched / 1e3:10.0f} kB: {speed / 1e3:8.1f} GB/s"
    gemms = (f"{8 * size} bits {rate / 1e6:.2f}" for size, rate in figures.gemms.items())
    yield f"  GEMMs, T operations a second: {', '.join(gemms)}"
    shares = (f"{8 * size} bits {share:.2f}" for size, share in figures.products.items())
    if figures.products:
        yield f"  generated GEMMs beside these: {', '.join(shares)}"
    if figures.costs:
        yield f"  in additions: {', '.join(f'{name} {cost:.0f}' for name, cost in figures.costs.items())}"
    yield f"kept in {path}"


def _of_core(identity: str, place: torch.device, threads: int) -> Figures:
    """Measure a CPU with all threads at work; the figures but the launch are those of one of them."""
    launch = _time(_add, _tensors(64, place))
    memory = []
    for touched in CPU_SIZES:
        count = touched * threads // 12
        took = _time(_add, _tensors(count, place))
        if took > CLEAR * launch:
            memory.append((float(touched), 12 * count / (took - launch) / threads))
    additions = _additions(threads << 15, launch, place) / threads
    gemms = {size: rate / threads for size, rate in _gemms(place).items()}
    names = (line.partition(":")[2].strip() for line in identity.splitlines() if line.startswith("model name"))
    costs = _costs(threads << 15, launch, additions * threads, place)
    return Figures(next(names, "CPU"), launch, _falling(memory), additions, gemms, _products(place), costs)


def _of_gpu(place: torch.device) -> Figures:
    launch = _time(_add, _tensors(64, place))
    moved = 12 * GPU_COUNT
    bandwidth = moved / (_time(_add, _tensors(GPU_COUNT, place)) - launch)
    additions = _additions(GPU_COUNT // 8, launch, place)
    return Figures(torch.cuda.get_device_name(), launch, ((float(moved), bandwidth),), additions, _gemms(place))


def _additions(count: int, launch: float, place: torch.device) -> float:
    """Return the additions per microsecond of a kernel over `count` elements that arithmetic bounds."""
    x, _ = _tensors(count, place)
    return 2 * CHAINS * LENGTH * count / (_time(_chain, [x]) - launch)


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


def _products(place: torch.device) -> dict[int, float]:
    """Return the speed of generated GEMMs relative to the library's, measured beside them, by size of an element."""
    shares = {}
    size = GEMM_ROWS[place.type]
    for dtype in DTYPES:
        left, right = (torch.randn(size, size, device=place).to(dtype) for _ in range(2))
        library = _rate(lambda left, right: torch.mm(left, right.t()), left, right)
        shares[dtype.itemsize] = _rate(_compiled(ONE_KERNEL), left, right) / library
    return shares


def _rate(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *operands: torch.Tensor) -> float:
    """Return the operations per microsecond of a GEMM."""
    call = partial(product, *operands)
    call()
    return 2 * operands[0].shape[0] * operands[1].numel() / median_time(call, operands[0].device)


def _compiled(way: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    torch._dynamo.reset()
    backend = Backend(Options.read(options={"graph_cache": False}), overrides=Overrides(products=way))
    return torch.compile(lambda left, right: torch.mm(left, right.t()), backend=backend, dynamic=False)


def _costs(count: int, launch: float, additions: float, place: torch.device) -> dict[str, float]:
    """Return the cost of each function in additions, of which the device does `additions` per microsecond."""
    x, _ = _tensors(count, place)
    costs = {}
    for name, function in FUNCTIONS.items():
        took = _time(partial(_sum_of, function), [x]) - launch
        own = took * additions / (count * CHAINS) - 3  # beside the sum, a product and a difference
        costs[name] = max(LEAST_COST, round(own, 1))
    return costs


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
