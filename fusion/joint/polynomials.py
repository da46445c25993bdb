"""Implements polynomials: sums of products of atoms, with exact coefficients, in which like terms are merged.

An atom is a tensor that is not decomposed, a sum over a row, or Σ_s Σ_d a[d]·B[d, s]·p[s], in either order of
summation; `normal_forms.py` assigns polynomials to the tensors of a graph.  Input and output here are plain data.

Only exact cancellation counts: coefficients are fractions and never rounded.  Powers cancel, so denominators are
assumed not to be 0; `factors.Quotient`, which is evaluated as written, cancels nothing.  Results that would get long
are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import sympy
import torch
from torch import fx

from fusion.joint.factors import Runs, merged_runs, value_of

MAX_TERMS = 48
"""The longest polynomial: longer products are not expanded."""


@dataclass(frozen=True)
class Summed:
    """Σ of a monomial over a row of some length, without factors that could be moved out."""

    over: Monomial
    size: sympy.Expr


@dataclass(frozen=True)
class Bilinear:
    """Σ_r Σ_c along_rows[r]·matrix[r, c]·along_columns[c]."""

    matrix: fx.Node
    rows: sympy.Expr
    columns: sympy.Expr
    along_rows: Monomial
    along_columns: Monomial


@dataclass(frozen=True)
class Atom:
    """A tensor that is not decomposed, broadcast by its runs (see `factors.Factor`).  A mask counts as 1 and 0."""

    source: fx.Node | Summed | Bilinear
    runs: Runs
    inverted: bool = False

    @property
    def is_mask(self) -> bool:
        """Whether it is a tensor of bools."""
        return isinstance(self.source, fx.Node) and value_of(self.source).dtype is torch.bool


Monomial: TypeAlias = "frozenset[tuple[Atom, int]]"
"""A product of atoms, each with its non-zero power."""
Polynomial: TypeAlias = Mapping[Monomial, Fraction]
"""A sum of monomials, each with its non-zero coefficient."""

ONE: Monomial = frozenset()


# The algebra ----------------------------------------------------------------------------------------------------------


def times(left: Monomial, right: Monomial) -> Monomial | None:
    """Return the product of two monomials; None if it is 0, as for a mask and its inverse."""
    powers = dict(left)
    for atom, power in right:
        powers[atom] = powers.get(atom, 0) + power
        if atom.is_mask and powers[atom] > 1:
            powers[atom] = 1
        if atom.is_mask and Atom(atom.source, atom.runs, not atom.inverted) in powers:
            return None
    return frozenset((atom, power) for atom, power in powers.items() if power)


def plus(left: Polynomial, right: Polynomial) -> Polynomial:
    """Return the sum of two polynomials."""
    terms = dict(left)
    for monomial, coefficient in right.items():
        terms[monomial] = terms.get(monomial, Fraction(0)) + coefficient
    return {monomial: coefficient for monomial, coefficient in terms.items() if coefficient}


def product(left: Polynomial, right: Polynomial) -> Polynomial | None:
    """Return the product of two polynomials, expanded; None if it is too long."""
    if len(left) * len(right) > MAX_TERMS:
        return None
    terms: Polynomial = {}
    for a, scale in left.items():
        for b, other in right.items():
            if (both := times(a, b)) is not None:
                terms = plus(terms, {both: scale * other})
    return terms


def inverse(of: Polynomial) -> Polynomial | None:
    """Return 1 / a single term without masks (which may be 0); None for any other polynomial."""
    if len(of) != 1:
        return None
    ((monomial, scale),) = of.items()
    if any(atom.is_mask for atom, _ in monomial):
        return None
    return {frozenset((atom, -power) for atom, power in monomial): 1 / scale}


def repeated(runs: Runs, outer: Runs) -> Runs | None:
    """Return the runs of a tensor, broadcast to `runs`, within a larger one; None if they do not match."""
    left = list(runs)
    factors: list[tuple[bool, sympy.Expr]] = []
    for varies, size in outer:
        if not varies:
            factors.append((False, size))
            continue
        while size != 1:
            if not left:
                return None
            along, extent = left.pop(0)
            if (size / extent).is_integer:
                factors.append((along, extent))
                size = size / extent
            elif (extent / size).is_integer:
                left.insert(0, (along, extent / size))
                factors.append((along, size))
                size = sympy.Integer(1)
            else:
                return None
    return merged_runs(factors)


def lifted(of: Polynomial, outer: Runs) -> Polynomial | None:
    """Return the polynomial of a tensor that is broadcast to a larger one; None if runs do not match."""
    terms: dict[Monomial, Fraction] = {}
    for monomial, scale in of.items():
        atoms: dict[Atom, int] = {}
        for atom, power in monomial:
            if (runs := repeated(atom.runs, outer)) is None:
                return None
            atoms[Atom(atom.source, runs, atom.inverted)] = power
        terms[frozenset(atoms.items())] = scale
    return terms


def before(runs: Runs, size: sympy.Expr) -> Runs | None:
    """Return the runs without a last axis of some size; None if they vary along it."""
    if not runs:
        return ()
    varies, last = runs[-1]
    if varies or not (last / size).is_integer:
        return None
    return merged_runs([*runs[:-1], (False, last / size)])


def split(monomial: Monomial, size: sympy.Expr) -> tuple[Monomial, Monomial]:
    """Split a monomial into the factors that can be moved out of a sum over the last axis, and the rest."""
    rows = {
        (Atom(a.source, runs, a.inverted), p): (a, p) for a, p in monomial if (runs := before(a.runs, size)) is not None
    }
    return frozenset(rows), monomial - frozenset(rows.values())
