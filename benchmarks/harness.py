"""Measures the same program on the same inputs under several systems, alternating, and checks it first.

A number is only reported if the result was right (its error against float64 no more than twice eager's), if Fusion
generated at least one kernel and if no region of it fell back to eager; otherwise the case is refused, with the reason.
Times are medians; a row with widely spread times is marked as noisy.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fusion
from benchmarks.clocks import peak_bytes, seconds_in_turn
from benchmarks.programs import Case

NOISE = 0.25
"""The interquartile range of a system's times, relative to their median, above which the row is marked."""

Results = tuple[Tensor, ...]
Program = Callable[..., Tensor | tuple[Tensor, ...]]


class Refused(Exception):
    """A case may not be reported; the message says why."""


REFUSALS = (Refused, fusion.FusionError, fusion.FusionWarning, torch.OutOfMemoryError)
"""Exceptions that a suite reports for a case before it continues with the next."""


@dataclass
class Result:
    """By system: seconds per run, error against float64, peak bytes and seconds of a cold compilation.

    `bytes` is the minimal traffic: inputs, result and gradients, once each.
    """

    case: Case
    bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    cold: dict[str, float] = field(default_factory=dict)
    noisy: bool = False


def measure(case: Case, device: str, *, rounds: int) -> Result:
    """Check and time one case under all its systems and against its rivals.

    Raises:
        Refused: a wrong result, or no generated kernel.
    """
    torch._dynamo.reset()
    inputs = case.make(device)
    backend = fusion.Backend(fusion.Options.read())
    programs = {system: _under(system, case.program, backend) for system in case.systems} | dict(case.rivals)
    calls = {name: closed(case, program, inputs) for name, program in programs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        results = {name: call() for name, call in calls.items()}
        check_generated(backend)
        result = Result(case, sum(tensor.nbytes for tensor in (*inputs, *results["fusion"])))
        result.errors = _errors(case, inputs, results)
        results.clear()
        if device == "cuda":
            result.peaks = {name: peak_bytes(call) for name, call in calls.items()}
        samples = seconds_in_turn(calls, device, rounds)
    for name, values in samples.items():
        low, result.seconds[name], high = statistics.quantiles(values, n=4)
        result.noisy |= high - low > NOISE * result.seconds[name]
    return result


def _under(system: str, program: Program, backend: fusion.Backend) -> Program:
    """Return the program under one of `eager`, `inductor`, `max-autotune` (inductor's) and `fusion`."""
    if system == "eager":
        return program
    if system == "fusion":
        return torch.compile(program, backend=backend, dynamic=False)
    mode = "max-autotune-no-cudagraphs" if system == "max-autotune" else None
    return torch.compile(program, backend="inductor", mode=mode, dynamic=False)


def closed(case: Case, program: Program, inputs: Sequence[Tensor]) -> Callable[[], Results]:
    """Return a call without arguments, which returns the result, and the gradients if the case asks for them."""
    if not case.gradients:

        def forward() -> Results:
            with torch.no_grad():
                result = program(*inputs)
            return result if isinstance(result, tuple) else (result,)

        return forward
    differentiated = [tensor for tensor in inputs if tensor.requires_grad]
    weights: list[Tensor] = []  # of the differentiated sum: the same numbers in every dtype

    def both() -> Results:
        result = program(*inputs)
        assert isinstance(result, Tensor)
        if not weights:
            generator = torch.Generator().manual_seed(1)
            weights.append(torch.randn(result.shape, generator=generator).bfloat16().to(result))
        return result.detach(), *torch.autograd.grad(result, differentiated, weights[0])

    return both


def check_generated(backend: fusion.Backend) -> None:
    """Check that Fusion's kernels were measured.

    Raises:
        Refused: a region fell back to eager, or there is no generated kernel.
    """
    for report in backend.reports:
        if report.failure:
            raise Refused(f"Fusion fell back to eager: {report.failure}")
    if not any(report.kernels for report in backend.reports):
        raise Refused("Fusion generated no kernel")


def _errors(case: Case, inputs: Sequence[Tensor], results: dict[str, Results]) -> dict[str, float]:
    """Return the norm of each system's error against float64 relative to the result's, of the tensor with the largest.

    Single elements are also checked: a wrong one among millions does not change a norm.
    """
    wide = [tensor.detach().double() if tensor.is_floating_point() else tensor for tensor in inputs]
    for tensor, given in zip(wide, inputs, strict=True):
        tensor.requires_grad_(given.requires_grad)
    exact = closed(case, case.program, wide)()
    for measure, times in ((_length, 2), (_largest, 4)):
        theirs, ours = measure(results["eager"], exact), measure(results["fusion"], exact)
        for error, reference in zip(ours, theirs, strict=True):
            if not error <= times * reference + 1e-6:  # written so that NaN fails
                raise Refused(f"Fusion's error is {error:.2e} ({measure.__name__[1:]}), eager's {reference:.2e}")
    return {name: max(_length(values, exact)) for name, values in results.items()}


def _length(values: Results, exact: Results) -> list[float]:
    """Return the norm of each error over that of the result."""
    pairs = zip(values, exact, strict=True)
    return [distance(result, right) for result, right in pairs]


def distance(result: Tensor, exact: Tensor) -> float:
    """Return the norm of an error, relative to that of the exact result."""
    return ((result.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def _largest(values: Results, exact: Results) -> list[float]:
    """Return the largest error of one element over the largest number."""
    pairs = zip(values, exact, strict=True)
    return [
        ((result.double() - right).abs().max() / right.abs().max().clamp_min(1e-30)).item() for result, right in pairs
    ]


def cold_seconds(suite: str, name: str, system: str) -> float:
    """Return the seconds of the first call in a fresh process with empty caches, without imports."""
    return start_seconds(suite, name, system, starts=1)[0]


def start_seconds(suite: str, name: str, system: str, starts: int = 2) -> list[float]:
    """Return the same for `starts` processes in a row: the later ones use the caches of the first.

    Raises:
        Refused: a process failed.
    """
    with tempfile.TemporaryDirectory(prefix="fusion-cold-", ignore_cleanup_errors=True) as folder:
        fresh = {
            variable: os.path.join(folder, variable)
            for variable in ("FUSION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        }
        command = [sys.executable, "-m", "benchmarks.cold", suite, name, system]
        seconds = []
        for _ in range(starts):
            done = subprocess.run(command, env={**os.environ, **fresh}, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise Refused(f"compilation with {system} failed: {done.stderr.strip().splitlines()[-1]}")
            seconds.append(float(json.loads(done.stdout.splitlines()[-1])["seconds"]))
    return seconds
