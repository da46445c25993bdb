"""Figures of agreement: how far predictions are from measurements, and what wrong decisions cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean


def deviation(ratios: Sequence[float]) -> float:
    """Return the geometric mean of the ratios, each taken the way that it is at least 1.

    >>> deviation([2.0, 0.5, 1.0, 1.0])
    1.4142135623730951
    """
    return math.exp(fmean(abs(math.log(ratio)) for ratio in ratios))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank.  NaN if either does not vary.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    ranks = [_ranks(values) for values in (first, second)]
    means = [fmean(each) if each else 0.0 for each in ranks]
    centred = [[rank - mean for rank in each] for each, mean in zip(ranks, means, strict=True)]
    norm = math.sqrt(math.prod(sum(x * x for x in each) for each in centred))
    return sum(x * y for x, y in zip(*centred, strict=True)) / norm if norm else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 0.

    >>> _ranks([5.0, 3.0, 5.0])
    [1.5, 0.0, 1.5]
    """
    order = sorted(values)
    first = {value: position for position, value in reversed([*enumerate(order)])}
    last = {value: position for position, value in enumerate(order)}
    return [(first[value] + last[value]) / 2 for value in values]


def mean_regret(regrets: Sequence[float]) -> float:
    """Return the geometric mean of times relative to the best, less 1.

    >>> round(mean_regret([0.0, 0.21]), 3)
    0.1
    """
    return math.exp(fmean(math.log1p(regret) for regret in regrets)) - 1
