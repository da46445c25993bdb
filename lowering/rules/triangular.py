"""Lowers systems of equations with small triangular matrices, solved by substitution, and Cholesky factors.

The other triangle of a matrix is not read.  Zeros on a diagonal give infinities and NaN; the factor of a matrix that is
not positive definite is NaN from the row on that `info` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fusion.lowering.builder import Builder
from fusion.lowering.indexing import axis_symbol
from fusion.lowering.registry import lowers
from fusion.lowering.rules.entries import (
    Entry,
    Matrices,
    assembled,
    batch_of,
    held,
    identity_like,
    pick,
    sides,
    transposed,
)
from fusion.lowering.rules.formula import Term, eq, isnan, literal, sqrt, where
from fusion.lowering.value import Shape, Value, broadcast_to

aten = torch.ops.aten

Solve = Callable[[Sequence[Term]], Sequence[Term]]
"""Returns the unknowns of a system, given its right-hand sides."""


def substituted(entry: Entry, known: Sequence[Term], *, upper: bool, unit: bool = False) -> Sequence[Term]:
    """Return the x with A·x = `known`, reading only the given triangle of A; `unit`: with ones on its diagonal."""
    order = range(len(known))
    unknowns: dict[int, Term] = {}
    for row in reversed(order) if upper else order:
        rest = known[row]
        for column, x in unknowns.items():
            rest = rest - entry(row, column) * x
        unknowns[row] = rest if unit else rest / entry(row, row)
    return [unknowns[row] for row in order]


def solved(b: Value, shape: Shape, count: int, solve: Solve, *, left: bool = True) -> Value:
    """Return the X with A·X = B, or with X·A = B if not `left`; `solve` takes one column (or row) of B at a time."""
    if 0 in shape:
        return assembled(shape, b, ())
    row, column = len(shape) - 2, len(shape) - 1
    sides_of = Matrices(b, shape, row)
    if left:
        unknowns = solve([sides_of.read(k, axis_symbol(column)) for k in range(count)])
    else:
        unknowns = solve([sides_of.read(axis_symbol(row), k) for k in range(count)])
    return held(shape, b, pick(row if left else column, unknowns))


@lowers(aten.linalg_solve_triangular.default)
def solve_triangular(
    ctx: Builder, a: Value, b: Value, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Value:
    """The X with A·X = B, or with X·A = B if not `left`."""
    count, _ = sides(ctx, a, b)
    shape = (*batch_of(a, b), *b.shape[-2:])
    entry: Entry = Matrices(a, shape, len(shape) - 2).read
    entry, upper = (entry, upper) if left else (transposed(entry), not upper)
    return solved(b, shape, count, lambda known: substituted(entry, known, upper=upper, unit=unitriangular), left=left)


@lowers(aten.triangular_solve.default)
def triangular_solve(
    ctx: Builder, b: Value, a: Value, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Value, Value]:
    """(the X with A·X = B, or with Aᵀ·X = B; a copy of A)."""
    count, _ = sides(ctx, a, b)
    shape = (*batch_of(a, b), *b.shape[-2:])
    entry: Entry = Matrices(a, shape, len(shape) - 2).read
    entry, upper = (transposed(entry), not upper) if transpose else (entry, upper)
    solution = solved(b, shape, count, lambda known: substituted(entry, known, upper=upper, unit=unitriangular))
    return solution, broadcast_to(a, (*shape[:-2], *a.shape[-2:]))


# Products of a triangle with its transpose ----------------------------------------------------------------------------


def _solved_by_factor(factor: Value, shape: Shape, upper: bool) -> Solve:
    entry: Entry = Matrices(factor, shape, len(shape) - 2).read
    lower = transposed(entry) if upper else entry
    return lambda known: substituted(transposed(lower), substituted(lower, known, upper=False), upper=True)


@lowers(aten.cholesky_solve.default)
def cholesky_solve(ctx: Builder, b: Value, factor: Value, upper: bool = False) -> Value:
    """The X with L·Lᵀ·X = B, or with Uᵀ·U·X = B."""
    count, _ = sides(ctx, factor, b)
    shape = (*batch_of(factor, b), *b.shape[-2:])
    return solved(b, shape, count, _solved_by_factor(factor, shape, upper))


@lowers(aten.cholesky_inverse.default)
def cholesky_inverse(ctx: Builder, factor: Value, upper: bool = False) -> Value:
    """The inverse of L·Lᵀ, or of Uᵀ·U."""
    count, _ = sides(ctx, factor)
    return solved(identity_like(factor), factor.shape, count, _solved_by_factor(factor, factor.shape, upper))


@lowers(aten.linalg_cholesky_ex.default)
def cholesky_ex(ctx: Builder, a: Value, *, upper: bool = False, check_errors: bool = False) -> tuple[Value, Value]:
    """(the lower L with L·Lᵀ = A, or the upper U with Uᵀ·U = A; 0, or the first row that has none)."""
    count, _ = sides(ctx, a)
    lead = a.shape[:-2]
    read: Entry = Matrices(a, a.shape, len(lead)).read
    entry = transposed(read) if upper else read
    lower_entries: dict[tuple[int, int], Term] = {}
    info = Term(literal(0, torch.int32))
    for k in range(count):
        for row in range(k, count):
            rest = entry(row, k)
            for j in range(k):
                rest = rest - lower_entries[row, j] * lower_entries[k, j]
            lower_entries[row, k] = sqrt(rest) if row == k else rest / lower_entries[k, k]
        info = where(eq(info, 0) & ((lower_entries[k, k] <= 0) | isnan(lower_entries[k, k])), k + 1, info)
    lower = [[lower_entries.get((row, k), Term(literal(0, a.dtype))) for k in range(count)] for row in range(count)]
    factor = [list(row) for row in zip(*lower, strict=True)] if upper else lower
    return assembled(a.shape, a, factor), held(lead, a, info)
