"""Holds the compiler's predictions against the machine: every kernel's time, and what wrong decisions cost.

Some 150 programs of all kinds of kernels and 20 models are compiled, and each of their kernels is measured on the
tensors it gets in its place in a call.  The geometric mean of the ratios, the worst ones and the rank correlation say
how right the price is.
"""

from __future__ import annotations

import json as text
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.harness import REFUSALS
from benchmarks.price.cases import cases
from benchmarks.price.measured import CallTime, KernelTime, Subject, measure, of_case, of_model
from benchmarks.price.models import models
from benchmarks.price.tables import agreement_table, counted

SECONDS = {("cpu", False): 1100.0, ("cpu", True): 160.0, ("cuda", False): 450.0, ("cuda", True): 150.0}
"""Device, and whether the run is quick → the seconds after which no more programs are begun."""
QUICK = 8
"""A quick run takes each so many-th case and model."""


def run(*, only: str, quick: bool, json: str | None = None) -> int:
    """Measure everything whose name contains `only`, and print the tables; return 1 if a program was refused."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start, limit = time.monotonic(), SECONDS[device, quick]
    print(f"{described(device)}; microseconds, every kernel on the tensors of its call")
    subjects = [subject for subject in _subjects(device, quick) if only in subject.name]
    if not subjects:
        print(f"no program of price has {only!r} in its name")
        return 2
    kernels: list[KernelTime] = []
    calls: list[CallTime] = []
    refused: dict[str, str] = {}
    done = 0
    for subject in subjects:
        if time.monotonic() - start > limit:
            break
        done += 1
        try:
            times = measure(subject, device)
        except REFUSALS as reason:
            refused[subject.name] = f"{type(reason).__name__}: {reason}"
            print(f"{subject.name}: refused: {reason}", flush=True)
            continue
        kernels += times[0]
        calls += times[1]
        print(_line(subject, times[0]), flush=True)
    if json is not None:
        figures = {
            "device": described(device),
            "kernels": [{**asdict(each), "ratio": each.ratio} for each in kernels],
            "calls": [asdict(each) for each in calls],
            "refused": refused,
        }
        Path(json).write_text(text.dumps(figures, indent=1), encoding="utf-8")
    for line in agreement_table(kernels, device):
        print(line)
    print(f"{done} of {len(subjects)} programs in {time.monotonic() - start:.0f} s, {len(refused)} refused")
    return int(bool(refused))


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


def _subjects(device: str, quick: bool) -> Iterator[Subject]:
    step = QUICK if quick else 1
    yield from map(of_case, cases(device)[::step])
    yield from map(of_model, models(device)[::step])


def _line(subject: Subject, kernels: Sequence[KernelTime]) -> str:
    """Return a line about the kernels of one program."""
    ratios = [each.ratio for each in kernels if each.ratio is not None]
    worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio), default=None)
    return f"{subject.name}: {counted(len(kernels), 'kernel')}" + ("" if worst is None else f", worst {worst:.2f}x")
