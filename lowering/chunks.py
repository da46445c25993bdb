"""Chunks: the node of a region that runs for some points of one axis at a time, and how its bodies are told which.

A body is a Program whose inputs are START, BETA and POINTS, the other sizes, the tensors that are read, sliced where
they are cut, and the sums so far; its outputs are slices of rows, and then the folds of this chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import sympy

from fusion.lowering.scalar_ops import FoldName

BodyT = TypeVar("BodyT")
"""A Program: what one is, is said in terms of this node."""

START = sympy.Symbol("chunk_start", integer=True, nonnegative=True)
"""The first point of a chunk."""
BETA = sympy.Symbol("chunk_beta", integer=True, nonnegative=True)
"""1 where a chunk is added to those before it, 0 in the first one."""
POINTS = sympy.Symbol("chunk_points", integer=True, positive=True)
"""The points of a chunk, where they are not known before it runs."""

ROWS = 16
"""Chunks start at multiples of this, so that slices are as aligned as what they are slices of."""

ADDED_UP: Mapping[FoldName, str] = {"sum": "add", "max": "maximum", "min": "minimum"}
"""Reduction → the function of torch that joins the results of two chunks."""


def even(length: int, fitting: int, most: int) -> int:
    """Points of a chunk if no more than `fitting` fit: chunks are of about equal size, and no more than `most`.

    >>> even(280, 100, 100), even(280, 100, 2), even(0, 100, 2)
    (96, 144, 16)
    """
    count = max(1, min(-(-length // fitting), most))
    return max(ROWS, -(-length // (count * ROWS)) * ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class Chunked(Generic[BodyT]):
    """A region that runs for some points of one axis at a time, by a Program of its own.

    What is read along that axis alone is sliced; everything else is read whole.  It makes `rows`, `sums` and `folds`,
    in this order.

    Attributes:
        bodies: the program of a chunk, and that of a last, shorter one; or one program for any number of points.
        length: points of the axis.
        sliced: buffers that are read, each with the dimension that is sliced, or None.
        rows: results made in slices → the dimension.
        sums: results of products, added up in place.
        folds: results of reductions → the reduction that joins chunks.
        symbols: size symbols that the bodies take.
        traced: points of the axis when the graph was traced.
        fitting: points that fit into the workspace.
        most: how many chunks there are at most, where sums over them are rounded each time.
        reason: why it is done in chunks.
    """

    bodies: tuple[BodyT, ...]
    length: sympy.Expr
    sliced: tuple[tuple[str, int | None], ...]
    rows: Mapping[str, int]
    sums: tuple[str, ...]
    folds: Mapping[str, FoldName]
    symbols: tuple[sympy.Symbol, ...]
    traced: int
    fitting: int
    most: int
    reason: str = ""

    @property
    def outs(self) -> tuple[str, ...]:
        """The tensors it makes."""
        return (*self.rows, *self.sums, *self.folds)

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensors it is given, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.sliced))

    @property
    def name(self) -> str:
        """What reports call it."""
        return "in_chunks"

    def even(self, length: int) -> int:
        """Points of a chunk, of about equal size."""
        return even(length, self.fitting, self.most)

    def starts(self, length: int) -> Iterator[tuple[int, int, int]]:
        """Each chunk: its first point, how many it has, and which of the bodies computes it."""
        step = self.even(length)
        for start in range(0, length, step):
            points = min(step, length - start)
            yield start, points, int(points < step) % len(self.bodies)
