"""Lowers LU factors of small matrices by Gaussian elimination, and their uses: systems, inverses, determinants.

Rows are pivoted as in LAPACK: the largest element of a column moves up, the first of equal ones.  A column of zeros is
left as it is and reported in `info`.  Factors are results, with which backward solves: where eager factors the
transpose, so do the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ZERO, axis_symbol
from fusion.lowering.ir.expr import IndexValue, const
from fusion.lowering.registry import lowers
from fusion.lowering.rules.assembly import tril, triu
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
from fusion.lowering.rules.formula import Term, absolute, call, eq, literal, log, ne, where
from fusion.lowering.rules.promotion import combine
from fusion.lowering.rules.triangular import Solve, solved, substituted
from fusion.lowering.rules.view import squeeze_dim, unsqueeze
from fusion.lowering.value import Shape, Value, axes_of

aten = torch.ops.aten

MOST_STEPS = 6**3
"""The largest product of rows, columns and pivots that is factored here: pivoting takes that much code, which would
compile for seconds if it were longer."""


@dataclass(frozen=True, slots=True)
class LuFactors:
    """L below the diagonal (its ones omitted), U on and above it, and the pivots.

    Attributes:
        rows: the entries.
        pivots: the row, counted from 1, that each row was exchanged with, int32.
        info: 0, or the first column without a pivot, int32.
    """

    rows: Sequence[Sequence[Term]]
    pivots: Sequence[Term]
    info: Term

    def solve(self, *, adjoint: bool) -> Solve:
        """Return a solver for A, or for its transpose."""
        return solver(lambda row, column: self.rows[row][column], self.pivots, adjoint=adjoint)

    @property
    def diagonal(self) -> Sequence[Term]:
        """The diagonal of U."""
        return [row[k] for k, row in enumerate(self.rows[: len(self.pivots)])]

    def lower(self, dtype: torch.dtype) -> list[list[Term]]:
        """The entries of L."""
        one, zero = (Term(literal(number, dtype)) for number in (1, 0))
        inner = range(len(self.pivots))
        return [[row[j] if j < i else one if j == i else zero for j in inner] for i, row in enumerate(self.rows)]

    def upper(self, dtype: torch.dtype) -> list[list[Term]]:
        """The entries of U."""
        zero, rows = Term(literal(0, dtype)), self.rows[: len(self.pivots)]
        return [[term if j >= i else zero for j, term in enumerate(row)] for i, row in enumerate(rows)]

    def sign(self, dtype: torch.dtype) -> Term:
        """Return the sign of the row permutation: -1 if the number of exchanges is odd, else 1."""
        total = Term(literal(1, dtype))
        for k, pivot in enumerate(self.pivots):
            total = where(ne(pivot, k + 1), -total, total)
        return total


def eliminated(entry: Entry, rows: int, columns: int, *, pivot: bool = True) -> LuFactors:
    """Return the LU factors of a matrix."""
    a = [[entry(row, column) for column in range(columns)] for row in range(rows)]
    pivots: list[Term] = []
    info = Term(const(0, torch.int32))
    for k in range(min(rows, columns)):
        pivots.append(_largest(a, k) if pivot else Term(const(k + 1, torch.int32)))
        if pivot:
            a = exchanged(a, k, pivots[k], range(k + 1, rows))
        info = where(eq(info, 0) & eq(a[k][k], 0), k + 1, info)
        for row in range(k + 1, rows):
            share = a[row][k] / a[k][k]
            if pivot:  # no element below is larger
                share = where(eq(a[k][k], 0), a[row][k], share)
            rest = [a[row][j] - share * a[k][j] for j in range(k + 1, columns)]
            a[row] = [*a[row][:k], share, *rest]
    return LuFactors(a, pivots, info)


def _largest(a: Sequence[Sequence[Term]], k: int) -> Term:
    """Return the first row from `k` on with the largest element in that column, counted from 1."""
    size, position = absolute(a[k][k]), Term(const(k + 1, torch.int32))
    for row in range(k + 1, len(a)):
        other = absolute(a[row][k])
        size, position = where(other > size, other, size), where(other > size, row + 1, position)
    return position


def exchanged(a: Sequence[Sequence[Term]], k: int, pivot: Term, among: Sequence[int]) -> list[list[Term]]:
    """Exchange row `k` with the row number `pivot`, which is `k` itself or one of `among`."""
    result, row_k = [list(row) for row in a], list(a[k])
    for row in among:
        here = eq(pivot, row + 1)
        row_k = [where(here, other, own) for other, own in zip(a[row], row_k, strict=True)]
        result[row] = [where(here, own, other) for own, other in zip(a[k], a[row], strict=True)]
    result[k] = row_k
    return result


def _others(k: int, count: int) -> Sequence[int]:
    """Return the rows except row `k`: a pivot from a tensor may name any of them."""
    return [row for row in range(count) if row != k]


def solver(entry: Entry, pivots: Sequence[Term], *, adjoint: bool) -> Solve:
    """Return a solver by the LU factors of A, or of its transpose."""

    def solve(known: Sequence[Term]) -> Sequence[Term]:
        x = [[term] for term in known]
        if not adjoint:
            for k, pivot in enumerate(pivots):
                x = exchanged(x, k, pivot, _others(k, len(x)))
            middle = substituted(entry, [term for (term,) in x], upper=False, unit=True)
            return substituted(entry, middle, upper=True)
        middle = substituted(transposed(entry), known, upper=False)
        x = [[term] for term in substituted(transposed(entry), middle, upper=True, unit=True)]
        for k in reversed(range(len(pivots))):
            x = exchanged(x, k, pivots[k], _others(k, len(x)))
        return [term for (term,) in x]

    return solve


def _factors(ctx: Builder, a: Value, batch: Shape, *, turned: bool = False, pivot: bool = True) -> LuFactors:
    """Factor the matrices, or their transposes, read over the axes of `batch`."""
    rows, columns = sides(ctx, a)
    if rows * columns * min(rows, columns) > MOST_STEPS:
        raise Unsupported(f"factors of matrices of {rows} rows and {columns} columns")
    if not pivot and a.device.type == "cpu":
        raise Unsupported("factors without exchanged rows, which eager has not got on a CPU")
    read: Entry = Matrices(a, batch, len(batch)).read
    return eliminated(transposed(read) if turned else read, rows, columns, pivot=pivot)


def _factors_transpose(ctx: Builder) -> bool:
    """Return whether eager factors the transpose of the first argument, as it does if that is contiguous."""
    a = ctx.current.args[0]
    assert isinstance(a, fx.Node)
    return bool(a.meta["val"].is_contiguous())


def _inner(a: Value) -> sympy.Expr:
    """Return the smaller of the numbers of rows and columns."""
    return sympy.Integer(min(map(int, a.shape[-2:])))


def _results(a: Value, factors: LuFactors) -> tuple[Value, Value]:
    """(the factors in one matrix, the pivots)."""
    lead = a.shape[:-2]
    pivots = factors.pivots or [Term(const(0, torch.int32))]
    together = assembled(a.shape, a, factors.rows)
    return together, held((*lead, _inner(a)), a, pick(len(lead), pivots))


# Factors --------------------------------------------------------------------------------------------------------------


@lowers(aten.linalg_lu_factor_ex.default)
def lu_factor_ex(
    ctx: Builder, a: Value, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Value, Value, Value]:
    """(the factors in one matrix, the pivots, 0 or the first column without a pivot)."""
    lead = a.shape[:-2]
    factors = _factors(ctx, a, lead, pivot=pivot)
    return (*_results(a, factors), held(lead, a, factors.info))


@lowers(aten.linalg_lu.default)
def lu(ctx: Builder, a: Value, *, pivot: bool = True) -> tuple[Value, Value, Value]:
    """(P, L, U) with P·L·U = A; without pivoting P is empty."""
    factors = _factors(ctx, a, a.shape[:-2], pivot=pivot)
    *lead, rows, columns = a.shape
    inner = _inner(a)
    lower, upper = factors.lower(a.dtype), factors.upper(a.dtype)
    parts = assembled((*lead, rows, inner), a, lower), assembled((*lead, inner, columns), a, upper)
    return _permutation(a, factors.pivots) if pivot else _empty(a), *parts


@lowers(aten.lu_unpack.default)
def lu_unpack(
    ctx: Builder, a: Value, pivots: Value, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Value, Value, Value]:
    """(P, L, U) of factors that are stored in one matrix."""
    sides(ctx, a)
    lower, upper = _triangles(ctx, a) if unpack_data else (_empty(a), _empty(a))
    return _permutation(a, _pivots_from(ctx, pivots, a.shape[:-2])) if unpack_pivots else _empty(a), lower, upper


def _pivots_from(ctx: Builder, pivots: Value, batch: Shape) -> list[Term]:
    """Read the pivots from a tensor."""
    read = Matrices(unsqueeze(ctx, pivots, -1), batch, len(batch)).read
    return [read(k, 0) for k in range(int(pivots.shape[-1]))]


def _empty(like: Value) -> Value:
    return held((ZERO,), like, Term(literal(0, like.dtype)))


def _triangles(ctx: Builder, a: Value) -> tuple[Value, Value]:
    """Split factors that are stored in one matrix into (L, U); L has ones on its diagonal."""
    *lead, rows, columns = a.shape
    inner = _inner(a)
    left, top = (a.view(shape, axes_of(shape)) for shape in ((*lead, rows, inner), (*lead, inner, columns)))
    return combine(Term.__add__, identity_like(left), tril(ctx, left, -1)), triu(ctx, top)


def _permutation(a: Value, pivots: Sequence[Term]) -> Value:
    """P, which has a one in column k at the row that became row k."""
    *lead, rows, _ = a.shape
    order = [[Term(const(k, torch.int64))] for k in range(int(rows))]
    for k, pivot in enumerate(pivots):
        order = exchanged(order, k, pivot, _others(k, len(order)))
    shape = (*lead, rows, rows)
    if 0 in shape:
        return assembled(shape, a, ())
    came = pick(len(lead) + 1, [term for (term,) in order])
    here = eq(came, Term(IndexValue(axis_symbol(len(lead)))))
    return held(shape, a, where(here, Term(literal(1, a.dtype)), 0))


# Systems --------------------------------------------------------------------------------------------------------------


@lowers(aten.linalg_lu_solve.default)
def lu_solve(ctx: Builder, a: Value, pivots: Value, b: Value, *, left: bool = True, adjoint: bool = False) -> Value:
    """The X with A·X = B, or with X·A = B if not `left`, from the LU factors of A, or of its transpose if `adjoint`."""
    count, _ = sides(ctx, a, b)
    shape = (*batch_of(a, b), *b.shape[-2:])
    batch = shape[:-2]
    entry: Entry = Matrices(a, batch, len(batch)).read
    by = solver(entry, _pivots_from(ctx, pivots, batch), adjoint=adjoint is left)
    return solved(b, shape, count, by, left=left)


@lowers(aten._linalg_solve_ex.default)
def solve_ex(
    ctx: Builder, a: Value, b: Value, *, left: bool = True, check_errors: bool = False
) -> tuple[Value, Value, Value, Value]:
    """(the X with A·X = B, or with X·A = B; the factors of A, its pivots, 0 or the first column without a pivot)."""
    count, _ = sides(ctx, a, b)
    vector = b.rank == 1 or (b.rank == a.rank - 1 and b.shape == a.shape[:-1])
    known = unsqueeze(ctx, b, -1) if vector else b
    shape = (*batch_of(a, known), *known.shape[-2:])
    by = _factors(ctx, a, shape[:-2]).solve(adjoint=not left)
    solution = solved(known, shape, count, by, left=left)
    factors = _factors(ctx, a, a.shape[:-2])
    return (
        squeeze_dim(ctx, solution, -1) if vector else solution,
        *_results(a, factors),
        held(a.shape[:-2], a, factors.info),
    )


@lowers(aten.linalg_inv_ex.default)
def inv_ex(ctx: Builder, a: Value, *, check_errors: bool = False) -> tuple[Value, Value]:
    """(the inverse; 0, or the first column without a pivot)."""
    count, _ = sides(ctx, a)
    lead = a.shape[:-2]
    factors = _factors(ctx, a, lead)
    inverse = solved(identity_like(a), a.shape, count, factors.solve(adjoint=False))
    return inverse, held(lead, a, factors.info)


# Determinants ---------------------------------------------------------------------------------------------------------


def _accumulated(terms: Sequence[Term], like: Value, start: float, join: Callable[[Term, Term], Term]) -> Term:
    total = Term(literal(start, like.dtype))
    for k, term in enumerate(terms):
        total = join(total, term) if k else term
    return total


@lowers(aten._linalg_det.default)
def det(ctx: Builder, a: Value) -> tuple[Value, Value, Value]:
    """(the determinant, the factors, the pivots)."""
    lead = a.shape[:-2]
    factors = _factors(ctx, a, lead, turned=_factors_transpose(ctx))
    product = _accumulated(factors.diagonal, a, 1, Term.__mul__)
    return held(lead, a, product * factors.sign(a.dtype)), *_results(a, factors)


@lowers(aten._linalg_slogdet.default)
def slogdet(ctx: Builder, a: Value) -> tuple[Value, Value, Value, Value]:
    """(the sign of the determinant, the logarithm of its absolute value, the factors, the pivots)."""
    lead = a.shape[:-2]
    factors = _factors(ctx, a, lead, turned=_factors_transpose(ctx))
    signs = [call("sign", term) for term in factors.diagonal]
    sign = _accumulated(signs, a, 1, Term.__mul__) * factors.sign(a.dtype)
    size = _accumulated([log(absolute(term)) for term in factors.diagonal], a, 0, Term.__add__)
    return held(lead, a, sign), held(lead, a, size), *_results(a, factors)
