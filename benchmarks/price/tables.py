"""Prints the agreement of predicted and measured times, overall, by kind of kernel, and the worst; and regrets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.price.agreement import deviation, mean_regret, rank_correlation
from benchmarks.price.measured import KernelTime
from benchmarks.price.pace import paces
from benchmarks.price.regret import CHOSEN, Regret

WORST = 10
"""The kernels that are named."""
LEAST = {"cpu": 50.0, "cuda": 5.0}
"""Device → the microseconds below which a kernel, predicted and measured, is left out: its launch is all there is."""


def agreement_table(kernels: Sequence[KernelTime], device: str) -> Iterator[str]:
    """Yield the lines of the table."""
    priced = [each for each in kernels if each.predicted]
    counting = [each for each in priced if max(each.predicted or 0.0, each.measured) >= LEAST[device]]
    yield ""
    if not counting:
        yield "no kernel that counts was measured"
        return
    yield f"the {min(WORST, len(counting))} kernels that are the farthest off (measured / predicted)"
    for each in sorted(counting, key=_off_by, reverse=True)[:WORST]:
        times = f"{each.predicted:>10.1f}{each.measured:>10.1f}{each.ratio:>8.2f}x"
        yield f"{times}  {each.kind:<18}{each.program} / {each.kernel}"
    yield ""
    yield f"{'kind':<24}{'kernels':>8}{'off by':>9}{'median':>9}{'rank':>8}{'at pace':>9}"
    paced = list(zip(counting, paces([each.probe for each in counting]), strict=True))
    kinds = sorted({each.kind for each in counting})
    for kind in kinds:
        yield _row(kind, [(each, pace) for each, pace in paced if each.kind == kind])
    yield _row("all", paced)
    slower = sorted(pace for _, pace in paced)
    median, worst = slower[len(slower) // 2], slower[-1]
    yield f"beside its best, the machine took {median:.2f} x as long in the median, {worst:.2f} x at worst"
    left = f"{counted(len(kernels) - len(priced), 'kernel')} without a price"
    yield f"left out: {left}, {len(priced) - len(counting)} below {LEAST[device]:.0f} µs"


def _row(name: str, paced: Sequence[tuple[KernelTime, float]]) -> str:
    """Return the geometric mean of the ratios, their median, the rank correlation, and the mean at the best pace.

    Args:
        paced: kernels, and how much slower the machine was than at its best (`pace.py`).
    """
    kernels = [each for each, _ in paced]
    ratios = sorted(each.ratio or 1.0 for each in kernels)
    rank = rank_correlation([each.predicted or 0.0 for each in kernels], [each.measured for each in kernels])
    at_pace = deviation([(each.ratio or 1.0) / pace for each, pace in paced])
    means = f"{deviation(ratios):>8.2f}x{ratios[len(ratios) // 2]:>8.2f}x{rank:>8.2f}{at_pace:>8.2f}x"
    return f"{name:<24}{len(kernels):>8}{means}"


def _off_by(each: KernelTime) -> float:
    ratio = each.ratio or 1.0
    return max(ratio, 1 / ratio)


def kernels_line(kernels: Sequence[KernelTime]) -> str:
    """Return a line about the kernels of one program."""
    ratios = [each.ratio for each in kernels if each.ratio is not None]
    worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio), default=None)
    return counted(len(kernels), "kernel") + ("" if worst is None else f", worst {worst:.2f}x")


def regret_line(found: Regret) -> str:
    """Return a line about one program with its alternatives."""
    times = ", ".join(f"{name} {microseconds:.1f}" for name, microseconds in found.times.items())
    return f"{found.regret:.1%} ({times})"


def regret_table(title: str, found: Sequence[Regret]) -> Iterator[str]:
    """Yield the geometric mean of the time lost, and the cases that lose the most, with the better alternative."""
    if not found:
        return
    yield ""
    mean = mean_regret([each.regret for each in found])
    worst = sorted(found, key=lambda each: each.regret, reverse=True)
    yield f"regret, {len(found)} {title}: {mean:.1%} in the geometric mean, worst {worst[0].regret:.1%}"
    for each in worst[:WORST]:
        if each.regret > 0:
            chosen, best = each.times[CHOSEN], each.times[each.best]
            yield f"{each.regret:>8.1%}{chosen:>11.1f}{best:>11.1f}  {each.name}: {each.best}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
