"""Computes small matrices entry by entry, without axes for rows and columns.

An entry is a term over the batch dimensions alone, one value per matrix; an element of a result picks its own.
Elimination takes some n³ operations, all of which are unrolled, so that matrices of more than a few rows are left to
the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ZERO, axis_symbol
from fusion.lowering.ir.expr import IndexValue
from fusion.lowering.rules.formula import Term, eq, literal, where
from fusion.lowering.value import Shape, Value, broadcast_shapes

LARGEST_SIDE = 8
"""The largest number of rows or columns of a matrix that is unrolled into entries."""


Entry = Callable[[int, int], Term]
"""Returns the entry of a matrix in a row and a column."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices in the last two dimensions of `value`, read over the axes of a result.

    Attributes:
        shape: the shape of the result, whose dimensions begin with those of the batch.
        batch: the number of batch dimensions.
    """

    value: Value
    shape: Shape
    batch: int

    def read(self, row: sympy.Expr | int, column: sympy.Expr | int) -> Term:
        """Return the element in a row and a column of each matrix."""
        sizes = self.value.shape[:-2]
        lead = [ZERO if n == 1 else axis_symbol(self.batch - len(sizes) + k) for k, n in enumerate(sizes)]
        return Term(self.value.view(self.shape, [*lead, sympy.sympify(row), sympy.sympify(column)]).expr)


def sides(ctx: Builder, *matrices: Value) -> tuple[int, int]:
    """Return the rows and columns of the first of some matrices.

    Raises:
        Unsupported: its entries should not be computed one by one.
    """
    rows, columns = matrices[0].shape[-2:]
    if ctx.wanted.rounded:
        raise Unsupported("strict numerics leave matrices to the library")
    if any(matrix.dtype not in (torch.float32, torch.float64) for matrix in matrices):
        raise Unsupported(f"matrices of {matrices[0].dtype}")
    if not (rows.is_Integer and columns.is_Integer) or rows > LARGEST_SIDE or columns > LARGEST_SIDE:
        raise Unsupported(f"matrices of more than {LARGEST_SIDE} rows or columns")
    return int(rows), int(columns)


def batch_of(*matrices: Value) -> Shape:
    """Return the dimensions before the last two, broadcast."""
    return broadcast_shapes([matrix.shape[:-2] for matrix in matrices])


def pick(dim: int, terms: Sequence[Term]) -> Term:
    """Select the term whose number is the position along `dim`."""
    at, selected = Term(IndexValue(axis_symbol(dim))), terms[-1]
    for k in reversed(range(len(terms) - 1)):
        selected = where(eq(at, k), terms[k], selected)
    return selected


def held(shape: Shape, like: Value, term: Term) -> Value:
    """Return a value of this shape that is `term` everywhere; without elements it reads nothing."""
    expr = literal(0, term.dtype) if 0 in shape else term.expr
    return Value(shape, term.dtype, like.device, expr)


def assembled(shape: Shape, like: Value, entries: Sequence[Sequence[Term]]) -> Value:
    """Return a value of this shape whose matrices have these entries, row by row."""
    if 0 in shape:
        return held(shape, like, Term(literal(0, like.dtype)))
    dim = len(shape) - 2
    return held(shape, like, pick(dim, [pick(dim + 1, row) for row in entries]))


def identity_like(like: Value) -> Value:
    """Return identity matrices in the shape of `like`."""
    row, column = (Term(IndexValue(axis_symbol(like.rank - k))) for k in (2, 1))
    one, zero = (Term(literal(number, like.dtype)) for number in (1, 0))
    return Value(like.shape, like.dtype, like.device, where(eq(row, column), one, zero).expr)


def transposed(entry: Entry) -> Entry:
    """Return the entries with rows and columns exchanged."""
    return lambda row, column: entry(column, row)


__all__ = ["Entry", "Matrices", "assembled", "batch_of", "held", "identity_like", "pick", "sides", "transposed"]
