"""Chooses numbers of parts that divide a length, so that all parts are equal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from fusion.lowering.indexing import split_points
from fusion.lowering.ir.expr import index_of, postorder
from fusion.lowering.ir.program import Axis, Reduce

_BUSY = 0.9
"""The least share of busy multiprocessors that is worth parts of equal length, which need no conditions."""


def fitting_divisor(node: Reduce, axis: Axis, wanted: int) -> int | None:
    """Return the divisor of the length of `axis` nearest to `wanted`, within a factor of two; None if there is none.

    If that axis stands for several axes of the operand, parts of whole rows, or that divide a row, are preferred: they
    have simple indices.
    """
    if not axis.size.is_Integer:
        return None
    length = int(axis.size)
    indices = [index for part in postorder(*node.args) for index in index_of(part)]
    bounds = [1, *split_points(indices, axis.symbol, axis.size), length]

    def is_even(count: int) -> bool:
        return any(length // count % a == 0 and b % (length // count) == 0 for a, b in pairwise(bounds))

    return near_divisor(length, wanted, is_even) or near_divisor(length, wanted)


def even_parts(length: int, slots: int) -> int | None:
    """Return the divisor of `length` with which parts, at most two to a slot, keep most slots busy; None if none does.

    >>> even_parts(8192, 132), even_parts(8000, 132), even_parts(12608, 132)
    (128, 125, None)
    """
    busy = {count: count / (slots * -(-count // slots)) for count in range(2, 2 * slots + 1) if length % count == 0}
    best = max(busy, key=lambda count: (busy[count], -count), default=None)
    return best if best is not None and busy[best] >= _BUSY else None


def near_divisor(length: int, wanted: int, fits: Callable[[int], bool] = lambda count: True) -> int | None:
    """Return the divisor of `length` nearest to `wanted`, within a factor of two and at least 2; None if there is none.

    >>> near_divisor(96, 7), near_divisor(97, 7), near_divisor(96, 1)
    (6, None, 2)
    """
    near = [d for d in range(max(2, wanted // 2), 2 * wanted + 1) if length % d == 0 and d <= length and fits(d)]
    return min(near, key=lambda d: abs(d - wanted), default=None)
