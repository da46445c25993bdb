"""Holds the compiler's predictions against the machine: every kernel's time, and what wrong decisions cost.

Some 150 programs of all kinds of kernels and 20 models are compiled, and each of their kernels is measured on the
tensors it gets in its place in a call.  The geometric mean of the ratios, the worst ones and the rank correlation say
how right the price is.  Then the alternatives of each program are built and timed: the regret is the time lost against
the best of them.
"""

from __future__ import annotations

import json as text
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path

import torch

from benchmarks.price.cases import cases
from benchmarks.price.measured import CallTime, KernelTime, Subject, measure, of_case, of_model
from benchmarks.price.regret import Regret, configurations_of, regret_of
from benchmarks.price.tables import agreement_table, kernels_line, regret_line, regret_table
from benchmarks.price.turns import in_processes
from benchmarks.small_models import models
from fusion.codegen.numerics import current
from fusion.codegen.targets import builder_for

SECONDS = {("cpu", False): 1080.0, ("cpu", True): 140.0, ("cuda", False): 420.0, ("cuda", True): 150.0}
"""Device, and whether the run is quick → the seconds after which no more programs are begun."""
SHARE = 0.6
"""The share of this time that kernels may take; the rest is for alternatives."""
QUICK = 8
"""A quick run takes each so many-th case and model."""
ROUNDS = {"cpu": 7, "cuda": 15}
"""Turns of the alternatives."""


@dataclass(slots=True)
class Figures:
    """All that a run measured; `refused` has the reason why a program, or its alternatives, were not measured."""

    device: str
    kernels: list[KernelTime] = field(default_factory=list)
    calls: list[CallTime] = field(default_factory=list)
    programs: list[Regret] = field(default_factory=list)
    configurations: list[Regret] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def measure(self, subject: Subject) -> str:
        """Measure the kernels of a program; return a line about them."""
        kernels, calls = measure(subject, self.device)
        self.kernels += kernels
        self.calls += calls
        return kernels_line(kernels)

    def compare(self, subject: Subject) -> str:
        """Time the alternatives of a program and, where there are any, of its kernels; return a line about them."""
        found = regret_of(subject, self.device, ROUNDS[self.device])
        self.programs.append(found)
        if self.device == "cuda":
            target = builder_for(self.device, None, current(strict=False)).target
            self.configurations += configurations_of(subject, self.device, target)
        return regret_line(found)

    def add(self, others: Figures) -> None:
        """Add what another process measured."""
        self.kernels += others.kernels
        self.calls += others.calls
        self.programs += others.programs
        self.configurations += others.configurations
        self.refused |= others.refused

    def write(self, file: str) -> None:
        """Write everything as JSON."""
        regrets = {"programs": self.programs, "configurations": self.configurations}
        figures: dict[str, object] = {
            "device": described(self.device),
            "kernels": [{**asdict(each), "ratio": each.ratio} for each in self.kernels],
            "calls": [asdict(each) for each in self.calls],
            "refused": self.refused,
        }
        for name, found in regrets.items():
            figures[name] = [{**asdict(each), "best": each.best, "regret": each.regret} for each in found]
        Path(file).write_text(text.dumps(figures, indent=1), encoding="utf-8")


def run(*, only: str, quick: bool, json: str | None = None, jobs: int = 1) -> int:
    """Measure everything whose name contains `only`, and print the tables; return 1 if a program was refused."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start, limit = time.monotonic(), SECONDS[device, quick]
    print(f"{described(device)}; microseconds")
    names = [name for name in _subjects(device, quick) if only in name]
    if not names:
        print(f"no program of price has {only!r} in its name")
        return 2
    figures = Figures(device)
    print("kernels: measured / predicted")
    measured = _each(partial(_measured, device, quick, start + SHARE * limit), names, figures, jobs)
    print("alternatives: the time lost against the best")
    compared = _each(partial(_compared, device, quick, start + limit), names, figures, jobs)
    if json is not None:
        figures.write(json)
    tables = (
        agreement_table(figures.kernels, device),
        regret_table("programs", figures.programs),
        regret_table("configurations", figures.configurations),
    )
    for line in chain.from_iterable(tables):
        print(line)
    reached = f"{measured} and {compared} of {len(names)} programs"
    print(f"{reached} in {time.monotonic() - start:.0f} s, {len(figures.refused)} refused")
    return int(bool(figures.refused))


def _each(work: Callable[[str], Figures | None], names: Sequence[str], figures: Figures, jobs: int) -> int:
    """Add the figures of each program; return the number that were reached in time."""
    results = in_processes(jobs, work, names) if jobs > 1 else ((name, work(name)) for name in names)
    reached = 0
    try:
        for _, others in results:
            if others is not None:
                figures.add(others)
                reached += 1
    except BrokenProcessPool as crash:  # the figures up to it must not be lost
        figures.refused[f"the programs after {reached}"] = str(crash)
    return reached


def _measured(device: str, quick: bool, until: float, name: str) -> Figures | None:
    """Measure the kernels of a program; None after the time `until` of the clock."""
    return _figures(Figures.measure, device, quick, until, name)


def _compared(device: str, quick: bool, until: float, name: str) -> Figures | None:
    """Time the alternatives of a program; None after the time `until` of the clock."""
    return _figures(Figures.compare, device, quick, until, name)


def _figures(
    what: Callable[[Figures, Subject], str], device: str, quick: bool, until: float, name: str
) -> Figures | None:
    if time.monotonic() > until:
        return None
    figures = Figures(device)
    try:
        print(f"{name}: {what(figures, _subjects(device, quick)[name])}", flush=True)
    except Exception as reason:  # of any library: the figures of the other programs must not be lost
        figures.refused[name] = f"{type(reason).__name__}: {reason}"
        print(f"{name}: refused: {reason}", flush=True)
    if device == "cuda":
        torch.cuda.empty_cache()  # other processes need the memory
    return figures


def described(device: str) -> str:
    """Return the device and the versions that the figures are of."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _processor() -> str:
    """Return the name of the CPU, as far as the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, f"{os.cpu_count()} CPUs")


@cache
def _subjects(device: str, quick: bool) -> dict[str, Subject]:
    """Return cases and models by name, in turn, so that a run that ends early has some of all."""
    step = QUICK if quick else 1
    all_models = [of_model(model) for model in models(device)[::step]]
    all_cases = [of_case(case) for case in cases(device)[::step]]
    between = -(-len(all_cases) // len(all_models))
    shares = ((*all_cases[k * between : (k + 1) * between], model) for k, model in enumerate(all_models))
    return {subject.name: subject for subject in chain.from_iterable(shares)}
