"""Prints the agreement of predicted and measured times: overall, by kind of kernel, and the worst."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.price.agreement import deviation, rank_correlation
from benchmarks.price.measured import KernelTime

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
    yield f"{'kind':<24}{'kernels':>8}{'off by':>9}{'median':>9}{'rank':>8}"
    kinds = sorted({each.kind for each in counting})
    for kind in kinds:
        yield _row(kind, [each for each in counting if each.kind == kind])
    yield _row("all", counting)
    left = f"{counted(len(kernels) - len(priced), 'kernel')} without a price"
    yield f"left out: {left}, {len(priced) - len(counting)} below {LEAST[device]:.0f} µs"


def _row(name: str, kernels: Sequence[KernelTime]) -> str:
    """Return the geometric mean of the ratios, their median, and the rank correlation of some kernels."""
    ratios = sorted(each.ratio or 1.0 for each in kernels)
    rank = rank_correlation([each.predicted or 0.0 for each in kernels], [each.measured for each in kernels])
    return f"{name:<24}{len(kernels):>8}{deviation(ratios):>8.2f}x{ratios[len(ratios) // 2]:>8.2f}x{rank:>8.2f}"


def _off_by(each: KernelTime) -> float:
    ratio = each.ratio or 1.0
    return max(ratio, 1 / ratio)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
