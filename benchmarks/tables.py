"""Prints the results of a suite: a row per case, and the geometric mean of the ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.harness import NOISE, Result

NAME = 50


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean.

    >>> geomean([1.0, 4.0])
    2.0
    """
    return math.exp(statistics.fmean(map(math.log, values)))


def header(systems: Sequence[str], *, cold: bool) -> str:
    """Return the names of the columns: milliseconds, ratios of times, error, and memory or traffic."""
    others = [system for system in systems if system != "fusion"]
    text = f"{'case':<{NAME}}" + "".join(f"{system + ' ms':>{_width(system)}}" for system in systems)
    text += "".join(f"{'vs ' + system:>{_width(system)}}" for system in others)
    text += f"{'GB/s':>8}{'error':>9}{'of eager':>10}{'MiB':>8}{'of eager':>10}"
    return text + (f"{'cold inductor':>15}{'cold fusion':>13}" if cold else "")


def row(result: Result) -> str:
    """Return the row of a case; `~` marks widely spread times."""
    medians = result.seconds
    others = [system for system in medians if system != "fusion"]
    text = f"{result.case.name:<{NAME}}"
    text += "".join(f"{seconds * 1e3:>{_width(system)}.4f}" for system, seconds in medians.items())
    text += "".join(f"{medians[other] / medians['fusion']:>{_width(other) - 1}.2f}x" for other in others)
    text += f"{result.bytes / medians['fusion'] / 1e9:>8.0f}"
    text += f"{result.errors['fusion']:>9.1e}{_share(result.errors):>10}"
    text += f"{result.peaks['fusion'] / 2**20:>8.0f}{_share(result.peaks):>10}" if result.peaks else f"{'':>18}"
    text += "".join(f"{seconds:>{15 if system == 'inductor' else 13}.2f}" for system, seconds in result.cold.items())
    return text + ("  ~" if result.noisy else "")


def _width(system: str) -> int:
    return max(11, len(system) + 5)


def _share(values: dict[str, float]) -> str:
    return f"{values['fusion'] / values['eager']:.2f}x" if values.get("eager") else "-"


def summary(results: Sequence[Result], chosen: int) -> list[str]:
    """Return the geometric means over the cases, against each system that all of them were run under."""
    common = set.intersection(*(set(result.seconds) for result in results)) - {"fusion"}
    parts = [
        f"{geomean([result.seconds[other] / result.seconds['fusion'] for result in results]):.2f}x against {other}"
        for other in results[0].seconds
        if other in common
    ]
    if len(common) > 1:
        best = [min(seconds for system, seconds in result.seconds.items() if system != "fusion") for result in results]
        ratio = geomean([other / result.seconds["fusion"] for other, result in zip(best, results, strict=True)])
        parts.append(f"{ratio:.2f}x against the fastest of them")
    if all(result.cold for result in results):
        ratio = geomean([result.cold["inductor"] / result.cold["fusion"] for result in results])
        parts.append(f"cold compilation {ratio:.2f}x against inductor")
    lines = [f"geometric mean: {', '.join(parts)} ({len(results)} of {chosen} cases; above 1 Fusion is faster)"]
    if any(result.noisy for result in results):
        lines.append(f"~ half of the runs differ by more than {NOISE:.0%}: other work on this machine; run it again")
    return lines
