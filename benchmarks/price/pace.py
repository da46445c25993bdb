"""Measures the pace of a CPU that others share: its memory and its arithmetic may be half as fast a minute later.

Input: the measured kernels of a run, each with the time of a probe at that moment; output: how much slower the machine
was than at its best in the run.  Probes are operations of PyTorch, so that no price and no generated code is involved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from benchmarks.price.turns import median_time_alone

MOVED, COMPUTED, SIDE = 1 << 20, 1 << 14, 512
"""Elements of each tensor of a sum, those of an exponential, and the side of a product."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The microseconds of the probe for a part of a price, at one moment."""

    part: str
    time: float


@cache
def _probes() -> Mapping[str, Callable[[], object]]:
    """Return a call for each part of a price that bounds kernels."""
    a, b, total = (torch.ones(MOVED) for _ in range(3))
    x, result = torch.ones(COMPUTED), torch.empty(COMPUTED)
    left, right, product = (torch.ones(SIDE, SIDE) for _ in range(3))
    return {
        "memory": partial(torch.add, a, b, out=total),
        "scalars": partial(torch.exp, x, out=result),
        "products": partial(torch.mm, left, right, out=product),
    }


def probed(device: str) -> dict[str, float]:
    """Return the microseconds of each probe now; none on a GPU, which no others share."""
    if device != "cpu":
        return {}
    return {part: median_time_alone(call, torch.device("cpu")) for part, call in _probes().items()}


def between(before: Mapping[str, float], after: Mapping[str, float], part: str) -> Probe | None:
    """Return the probe of the part that bounds a kernel, which was measured between two moments."""
    if part not in before:
        return None
    return Probe(part, math.sqrt(before[part] * after[part]))


def paces(probes: Sequence[Probe | None]) -> list[float]:
    """Return for each probe how many times as long it took as at its best; 1 where there is none.

    >>> paces([Probe("memory", 30.0), Probe("memory", 20.0), None])
    [1.5, 1.0, 1.0]
    """
    best: dict[str, float] = {}
    for probe in probes:
        if probe is not None:
            best[probe.part] = min(probe.time, best.get(probe.part, probe.time))
    return [1.0 if probe is None else probe.time / best[probe.part] for probe in probes]


__all__ = ["Probe", "between", "paces", "probed"]
