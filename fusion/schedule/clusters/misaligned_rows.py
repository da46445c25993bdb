"""Finds matrices with misaligned rows, and predicts how much slower their products are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import sympy

from fusion.codegen.target import Capabilities
from fusion.lowering.indexing import ONE
from fusion.lowering.ir.program import Buffer, Contract, Extern, Node, reads, writes

BYTES = 16
SHORTEST_ALIGNED = 8 * BYTES
"""Bytes of the shortest row that is aligned."""


def is_odd(buffer: Buffer) -> bool:
    """Return whether a 16-bit matrix has rows that start at unaligned addresses; unknown sizes count as aligned."""
    return buffer.dtype.itemsize == 2 and padded_strides(buffer) is not None


def generated_share(node: Contract, estimate: Callable[[sympy.Expr], int], capabilities: Capabilities) -> float:
    """Return the speed of a generated product of misaligned rows, relative to the library's product of aligned ones.

    Threads load single elements and wait for them in each step, whether other multiprocessors have a tile or not: it
    takes as long as if all had one.  (measured: docs/performance.md, `misaligned_rows`)
    """
    share, processors = capabilities.misaligned_rows.product, capabilities.multiprocessors
    if share == 1 or not processors:
        return share
    length = {axis.symbol: estimate(axis.size) for axis in node.axes}
    tiles = math.prod(length[symbol] for symbol in length if symbol not in (*node.rows, *node.columns))
    for symbols, side in ((node.rows, capabilities.tiles.rows), (node.columns, capabilities.tiles.columns)):
        tiles *= -(-math.prod(length[symbol] for symbol in symbols) // side)
    tiles = max(tiles, 1)  # a symbolic size may have been 0 when the graph was traced
    return share * tiles / (processors * -(-tiles // processors))


def alignment_of_calls(calls: Iterable[Node], buffers: Mapping[str, Buffer]) -> int:
    """Return the bytes to which all rows are aligned that the library's calls of a 16-bit product touch.

    Of a result in float32 each element counts as 16 bits, as the library's kernel is chosen by elements.
    """
    products = [call for call in calls if isinstance(call, Extern) and not call.is_view]
    touched = [buffers[name] for call in products for name in (*reads(call), *writes(call))]
    if all(buffer.dtype.itemsize != 2 for buffer in touched):
        return BYTES
    return min(map(_row_alignment, touched))


def _row_alignment(buffer: Buffer) -> int:
    """Return the alignment of all rows in bytes of 16-bit elements, at most `BYTES`; unknown strides are aligned."""
    steps = (stride for stride, length in zip(buffer.strides, buffer.shape, strict=True) if length != 1)
    return math.gcd(BYTES, *(2 * int(step) for step in steps if step.is_Integer and step != 1))


def padded_strides(buffer: Buffer) -> tuple[sympy.Expr, ...] | None:
    """Return the strides of a row-major buffer with padded rows; None if it is not row-major or is aligned."""
    size = buffer.dtype.itemsize
    if len(buffer.shape) < 2 or not all(length.is_Integer and length > 0 for length in buffer.shape):
        return None
    row = int(buffer.shape[-1])
    if row * size % BYTES == 0 or row * size < SHORTEST_ALIGNED:
        return None
    strides: list[sympy.Expr] = []
    row_major, padded = ONE, ONE
    for position, (length, stride) in enumerate(reversed(list(zip(buffer.shape, buffer.strides, strict=True)))):
        if stride != row_major and length != 1:
            return None
        strides.append(padded)
        row_major *= length
        padded *= length if position else sympy.Integer(-(-row * size // BYTES) * BYTES // size)
    return tuple(reversed(strides))
