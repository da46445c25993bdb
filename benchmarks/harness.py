"""The harness: the same program on the same inputs under several systems, run in turn, checked before it is reported.

A number is only reported if the result was right (error against float64 no more than twice eager's), if Fusion
generated at least one kernel and if no region of it fell back to eager; otherwise the case is refused, with the reason.
Times are medians of runs that alternate between the systems, so that a busy moment of the machine hits all of them; a
row whose runs differ much from each other is marked as noisy.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fusion
from benchmarks.programs import Case

SYSTEMS = ("eager", "inductor", "fusion")
FLUSH_BYTES = 512 << 20
"""Zeroed between timed runs on a GPU: more than its L2, and long enough to hide the launch of what follows."""


NOISE = 0.25
"""Half of the runs of one system may differ by this share of their median before the row is marked."""


class Refused(Exception):
    """A case that may not be reported, and why."""


@dataclass
class Result:
    """Seconds per run, error against float64 and seconds of a cold compilation, by system."""

    case: Case
    bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    cold: dict[str, float] = field(default_factory=dict)
    noisy: bool = False


def measure(case: Case, device: str, *, rounds: int) -> Result:
    """Check and time one case under all systems.

    Raises:
        Refused: a wrong result, or no generated kernel.
    """
    torch._dynamo.reset()
    inputs = case.make(device)
    backend = fusion.Backend(fusion.Options.read())
    calls = {
        "eager": case.program,
        "inductor": torch.compile(case.program, backend="inductor", dynamic=False),
        "fusion": torch.compile(case.program, backend=backend, dynamic=False),
    }
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        results = {system: call(*inputs) for system, call in calls.items()}
        _check_generated(backend)
        moved = sum(tensor.nbytes for tensor in (*inputs, results["eager"]))
        result = Result(case, moved, errors=_errors(case, inputs, results))
        time_in_turn = _cuda_seconds if device == "cuda" else _cpu_seconds
        samples = time_in_turn({system: _closed(call, inputs) for system, call in calls.items()}, rounds)
    for system, values in samples.items():
        low, result.seconds[system], high = statistics.quantiles(values, n=4)
        result.noisy |= high - low > NOISE * result.seconds[system]
    return result


def _closed(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
    return lambda: call(*inputs)


def _check_generated(backend: fusion.Backend) -> None:
    for report in backend.reports:
        if report.failure:
            raise Refused(f"Fusion fell back to eager: {report.failure}")
    if not any(report.kernels for report in backend.reports):
        raise Refused("Fusion generated no kernel")


def _errors(case: Case, inputs: Sequence[Tensor], results: dict[str, Tensor]) -> dict[str, float]:
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    exact = case.program(*wide).double()
    errors = {system: (result.double() - exact).abs().max().item() for system, result in results.items()}
    tiny = 1e-6 * max(1.0, exact.abs().max().item())
    if not errors["fusion"] <= 2 * errors["eager"] + tiny:  # written so that NaN fails
        raise Refused(f"Fusion's error is {errors['fusion']:.2e}, eager's {errors['eager']:.2e}")
    return errors


# Timing -----------------------------------------------------------------------------------------------------


def _cpu_seconds(calls: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[float]]:
    """Seconds per run, for each round.  Short runs are repeated within a round until a sample lasts about 5 ms."""
    repeats = {}
    for system, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        repeats[system] = max(1, math.ceil(5e-3 / (time.perf_counter() - start)))
    samples: dict[str, list[float]] = {system: [] for system in calls}
    for _ in range(rounds):
        for system, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[system]):
                call()
            samples[system].append((time.perf_counter() - start) / repeats[system])
    return samples


def _cuda_seconds(calls: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run on the device, between events, with the L2 cache flushed before."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for call in calls.values():
        for _ in range(5):
            call()
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {system: [] for system in calls}
    for _ in range(rounds):
        for system, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            call()
            end.record()
            marks[system].append((start, end))
        torch.cuda.synchronize()
    return {system: [start.elapsed_time(end) / 1e3 for start, end in pairs] for system, pairs in marks.items()}


# Cold compilation -------------------------------------------------------------------------------------------


def cold_seconds(suite: str, name: str, system: str) -> float:
    """Seconds of the first call in a fresh process with empty caches, imports not counted."""
    with tempfile.TemporaryDirectory(prefix="fusion-cold-", ignore_cleanup_errors=True) as folder:
        fresh = {
            variable: os.path.join(folder, variable)
            for variable in ("FUSION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        }
        command = [sys.executable, "-m", "benchmarks.cold", suite, name, system]
        done = subprocess.run(command, env={**os.environ, **fresh}, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise Refused(f"cold compilation with {system} failed: {done.stderr.strip().splitlines()[-1]}")
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


# Tables -----------------------------------------------------------------------------------------------------


def geomean(values: Sequence[float]) -> float:
    """The geometric mean.

    >>> geomean([1.0, 4.0])
    2.0
    """
    return math.exp(statistics.fmean(map(math.log, values)))


def header(*, cold: bool) -> str:
    text = f"{'case':<26}" + "".join(f"{system + ' ms':>13}" for system in SYSTEMS)
    text += f"{'vs eager':>10}{'vs inductor':>13}{'GB/s':>9}{'error':>10}"
    return text + (f"{'cold inductor':>15}{'cold fusion':>13}" if cold else "")


def row(result: Result) -> str:
    medians = result.seconds
    text = f"{result.case.name:<26}" + "".join(f"{medians[system] * 1e3:>13.4f}" for system in SYSTEMS)
    ratios = [medians[other] / medians["fusion"] for other in ("eager", "inductor")]
    text += f"{ratios[0]:>9.2f}x{ratios[1]:>12.2f}x{result.bytes / medians['fusion'] / 1e9:>9.1f}"
    text += f"{result.errors['fusion']:>10.1e}"
    widths = {"inductor": 13, "fusion": 11}
    text += "".join(f"{seconds:>{widths[system]}.2f} s" for system, seconds in result.cold.items())
    return text + ("  ~" if result.noisy else "")


def run_suite(suite: str, cases: Sequence[Case], device: str, *, rounds: int, cold: bool, only: str) -> int:
    """Measure and print all cases; returns 1 if any was refused."""
    chosen = [case for case in cases if only in case.name]
    if not chosen:
        print(f"no case of {suite} has {only!r} in its name: {', '.join(case.name for case in cases)}")
        return 2
    print(header(cold=cold))
    results, refused = [], 0
    for case in chosen:
        try:
            result = measure(case, device, rounds=rounds)
            if cold:
                result.cold = {system: cold_seconds(suite, case.name, system) for system in ("inductor", "fusion")}
        except (Refused, fusion.FusionError, fusion.FusionWarning) as reason:
            refused += 1
            print(f"{case.name:<26}refused: {reason}", flush=True)
            continue
        results.append(result)
        print(row(result), flush=True)
    if results:
        summary = "geometric mean of the ratios: "
        for other in ("eager", "inductor"):
            ratio = geomean([result.seconds[other] / result.seconds["fusion"] for result in results])
            summary += f"{ratio:.2f}x against {other}, "
        if cold:
            ratio = geomean([result.cold["inductor"] / result.cold["fusion"] for result in results])
            summary += f"cold compilation {ratio:.2f}x against inductor, "
        print(summary.removesuffix(", ") + f" ({len(results)} of {len(chosen)} cases; above 1 Fusion is faster)")
        if any(result.noisy for result in results):
            print(f"~ half of the runs differ by more than {NOISE:.0%}: other work on this machine; run it again")
    return int(refused > 0)
