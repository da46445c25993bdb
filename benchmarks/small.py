"""Times twenty small models whole: eager, TorchInductor and Fusion in turn, forward passes and training steps.

Each result of Fusion is first compared with eager's in float64.  A ratio below 1 to the better of the others is a loss.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

import fusion
from benchmarks.clocks import wall_seconds_in_turn
from benchmarks.harness import Refused, check_generated, distance
from benchmarks.price.measured import called
from benchmarks.small_models import Model, models
from benchmarks.suite import print_rows

SYSTEMS = ("eager", "inductor", "fusion")
ALLOWED = 2.0
"""The largest error of a result, relative to eager's."""

WARM_UP = 3


def run(*, only: str, quick: bool) -> int:
    """Time all models whose name contains `only`; return 1 if one was refused."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}; milliseconds a call, by the clock")
    print(f"{'model':<22}" + "".join(f"{system:>10}" for system in SYSTEMS) + f"{'to best':>9}{'error':>8}")
    ratios: dict[str, Mapping[str, float]] = {}
    chosen = [model for model in models(device) if only in model.name]
    refused = print_rows((model.name, partial(measured, model, device, 7 if quick else 25, ratios)) for model in chosen)
    if ratios:
        means = {rival: statistics.geometric_mean(each[rival] for each in ratios.values()) for rival in SYSTEMS[:2]}
        worst = min(ratios, key=lambda name: min(ratios[name].values()))
        print(f"geometric mean: {means['eager']:.2f} x eager, {means['inductor']:.2f} x inductor", end="; ")
        print(f"worst: {worst}, {min(ratios[worst].values()):.2f} x the better of them")
    return refused


def measured(model: Model, device: str, rounds: int, ratios: dict[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the row of a model, and add how many times as fast as the others Fusion is.

    Raises:
        Refused: a wrong result, or no generated kernel.
    """
    torch._dynamo.reset()
    backend = fusion.Backend(fusion.Options.read())
    compilers = {
        "eager": lambda program: program,
        "inductor": partial(torch.compile, backend="inductor", dynamic=False),
        "fusion": partial(torch.compile, backend=backend, dynamic=False),
    }
    exact = called(model, device, torch.float64)(compilers["eager"])()
    calls = {name: called(model, device)(compiler) for name, compiler in compilers.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        errors = {name: _error(call(), exact) for name, call in calls.items()}
    check_generated(backend)
    if not errors["fusion"] <= ALLOWED * errors["eager"]:
        raise Refused(f"errors {errors}")
    for call in [*calls.values()] * WARM_UP:
        call()
    times = {name: statistics.median(each) for name, each in wall_seconds_in_turn(calls, device, rounds).items()}
    ratios[model.name] = {rival: times[rival] / times["fusion"] for rival in SYSTEMS[:2]}
    text = f"{model.name:<22}" + "".join(f"{times[system] * 1e3:>10.3f}" for system in SYSTEMS)
    yield f"{text}{min(ratios[model.name].values()):>8.2f}x{errors['fusion'] / errors['eager']:>7.2f}x"


def _error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest distance of a result, relative to the size of the exact one."""
    assert len(results) == len(exact)
    return max(distance(result, wanted) for result, wanted in zip(results, exact, strict=True))
