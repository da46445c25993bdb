"""Tells matrices whose rows start at odd addresses, and how much slower products of these are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import sympy

from fusion.lowering.program import Buffer, Extern, Node, reads, writes

BYTES = 16
SHORTEST = 8 * BYTES
"""Bytes of the shortest row that is aligned."""


def is_odd(buffer: Buffer) -> bool:
    """Does a matrix of halves have rows that do not all start at aligned addresses?  Unknown sizes count as aligned."""
    return buffer.dtype.itemsize == 2 and padded_strides(buffer) is not None


def share_of_library(calls: Iterable[Node], buffers: Mapping[str, Buffer], speeds: Mapping[int, float]) -> float:
    """Returns the speed of the library's calls of a product against aligned ones, from `OddRows.library`."""
    products = [call for call in calls if isinstance(call, Extern) and not call.is_view]
    touched = [buffers[name] for call in products for name in (*reads(call), *writes(call))]
    return min((speeds[_word(buffer)] for buffer in touched if buffer.dtype.itemsize == 2), default=1.0)


def _word(buffer: Buffer) -> int:
    """Of how many bytes, at most a whole word, the starts of all rows are multiples; unknown strides count as that."""
    steps = (stride for stride, length in zip(buffer.strides, buffer.shape, strict=True) if length != 1)
    return math.gcd(BYTES, *(int(step) * buffer.dtype.itemsize for step in steps if step.is_Integer and step != 1))


def padded_strides(buffer: Buffer) -> tuple[sympy.Expr, ...] | None:
    """The strides of a row-major buffer with aligned rows; None where it is not one, or has them."""
    size = buffer.dtype.itemsize
    if len(buffer.shape) < 2 or not all(length.is_Integer and length > 0 for length in buffer.shape):
        return None
    row = int(buffer.shape[-1])
    if row * size % BYTES == 0 or row * size < SHORTEST:
        return None
    strides: list[sympy.Expr] = []
    plain, apart = sympy.Integer(1), sympy.Integer(1)
    for position, (length, stride) in enumerate(reversed(list(zip(buffer.shape, buffer.strides, strict=True)))):
        if stride != plain and length != 1:
            return None
        strides.append(apart)
        plain *= length
        apart *= length if position else sympy.Integer(-(-row * size // BYTES) * BYTES // size)
    return tuple(reversed(strides))
