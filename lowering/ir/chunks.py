"""Defines `Chunked`, a node that runs its bodies once per chunk of one axis, and the size symbols of the bodies.

A body is a Program.  Its inputs are START, BETA and POINTS, other sizes, the tensors that it reads (sliced along the
axis) and the running sums; its outputs are slices of rows, and then the reductions of this chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import sympy

from fusion.lowering.ir.scalar_ops import FoldName

BodyT = TypeVar("BodyT")
"""A Program; `program.py` defines it in terms of this node."""

START = sympy.Symbol("chunk_start", integer=True, nonnegative=True)
"""The first point of a chunk."""
BETA = sympy.Symbol("chunk_beta", integer=True, nonnegative=True)
"""0 in the first chunk, whose sums are stored; 1 in later chunks, whose sums are accumulated."""
POINTS = sympy.Symbol("chunk_points", integer=True, positive=True)
"""The number of points of a chunk, if it is only known when the chunk runs."""

ROW_MULTIPLE = 16
"""Chunks start at multiples of this, so that slices keep the alignment of the full tensors."""

COMBINED: frozenset[FoldName] = frozenset({"sum", "max", "min"})
"""The reductions whose results of two chunks are combined (`FoldOp.joined_by`)."""


def even(length: int, fitting: int, most: int) -> int:
    """Return the rows of a chunk: chunks of about equal size, at most `fitting` long, and at most `most` of them.

    >>> even(280, 100, 100), even(280, 100, 2), even(0, 100, 2)
    (96, 144, 16)
    """
    count = max(1, min(-(-length // fitting), most))
    return max(ROW_MULTIPLE, -(-length // (count * ROW_MULTIPLE)) * ROW_MULTIPLE)


@dataclass(frozen=True, slots=True, eq=False)
class Chunked(Generic[BodyT]):
    """A region that a Program of its own computes for some points of one axis at a time.

    Tensors that are read along that axis alone are sliced, others are passed in full.  Its results are `rows`, `sums`
    and `folds`, in this order.

    Attributes:
        bodies: the program of a chunk, and of a last, shorter one; or one program for any number of points.
        length: points of the axis.
        sliced: buffers that are read, each with the dimension that is sliced, or None.
        rows: results written slice by slice → the dimension.
        sums: results of products, accumulated in place.
        folds: results of reductions → the reduction that combines chunks.
        symbols: size symbols that the bodies take.
        traced: points of the axis when the graph was traced.
        fitting: points that fit into the workspace.
        most: the largest number of chunks, because sums over them are rounded once per chunk.
        reason: why it runs in chunks.
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
        """The tensors that the region computes."""
        return (*self.rows, *self.sums, *self.folds)

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensors that the region reads, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.sliced))

    @property
    def name(self) -> str:
        """The name in reports."""
        return "in_chunks"

    def even(self, length: int) -> int:
        """Return the rows of a chunk for an axis of this length; chunks are of about equal size."""
        return even(length, self.fitting, self.most)

    def starts(self, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield each chunk: its first point, its number of points, and the index of its body."""
        step = self.even(length)
        for start in range(0, length, step):
            points = min(step, length - start)
            yield start, points, int(points < step) % len(self.bodies)
