"""Converts float tensors of an ATen graph to polynomials, equal for tensors that are algebraically equal.

Two tensors with the same value in real arithmetic, computed only by products, sums, sums over their last axis and
matrix products, have equal forms; a tensor that is 0 has no terms.  So

    Σ_j (g_j - Σ_k g_k·e_k / l)·e_j / l      with l = Σ_j e_j

is Σ_j g_j·e_j / l - (Σ_k g_k·e_k)·l / l² and vanishes.  Other tensors are atoms of this algebra.  A sum over a row
is split by terms, and factors that do not vary along the row are moved out of it.

Input: an fx node whose `val` has its shape.  Nothing is refused: a form that would be too long is one atom.
Conversions between floats are ignored, as they only round.
"""

from __future__ import annotations

from fractions import Fraction
from math import isfinite

import sympy
from torch import fx

from fusion.joint.factors import (
    Factor,
    Part,
    Runs,
    added,
    count,
    factor_of,
    is_product,
    matrix_root,
    merged_runs,
    multiplied,
    operands,
    root,
    shape_of,
    value_of,
)
from fusion.joint.facts import broadcast_of, row_sum
from fusion.joint.polynomials import (
    MAX_TERMS,
    ONE,
    Atom,
    Bilinear,
    Monomial,
    Polynomial,
    Summed,
    inverse,
    lifted,
    plus,
    product,
    split,
    times,
)
from fusion.lowering.value import Shape

MAX_POWER = 8
MAX_DIVISORS = 4
"""How many sums in denominators are multiplied out."""
MAX_NESTED = 24
"""How many nested matrix products are expanded."""


class Forms:
    """The polynomials of the tensors of one graph.

    >>> import torch
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> def f(e, g):
    ...     p = e / e.sum(-1, keepdim=True)
    ...     return (p * (g - (p * g).sum(-1, keepdim=True))).sum(-1)
    >>> graph = make_fx(f, tracing_mode="fake")(torch.ones(3, 5), torch.ones(3, 5))
    >>> Forms().vanishes(graph.graph.output_node().args[0])
    True
    """

    def __init__(self) -> None:
        self._known: dict[fx.Node, Polynomial] = {}
        self._nested = 0

    def of(self, node: fx.Node) -> Polynomial:
        """Return the form of a tensor, over its elements in order."""
        todo = [root(node)]
        while todo:
            if todo[-1] in self._known:
                todo.pop()
            elif missing := [part for part in _parts(todo[-1]) if part not in self._known]:
                todo += missing
            else:
                self._known[todo[-1]] = self._form(todo[-1])
        return self._known[root(node)]

    def vanishes(self, node: fx.Node) -> bool:
        """Return whether a tensor is 0 wherever its denominators are not."""
        terms = self.of(node)
        for _ in range(MAX_DIVISORS):
            divisors = [atom for term in terms for atom, power in term if power < 0 and self._is_sum(atom.source)]
            if not divisors:
                break
            terms = self._cleared(terms, min(divisors, key=lambda atom: str(atom.source)))
        return not terms

    def _is_sum(self, source: object) -> bool:
        return isinstance(source, fx.Node) and len(self._known[source]) > 1

    def _cleared(self, terms: Polynomial, divisor: Atom) -> Polynomial:
        """Multiply a polynomial by a sum in its denominators, expanded; unchanged if that is too long."""
        assert isinstance(divisor.source, fx.Node)
        total = lifted(self._known[divisor.source], divisor.runs)
        most = max(-power for term in terms for atom, power in term if atom == divisor)
        form: Polynomial = {}
        for term, scale in terms.items():
            left = most + dict(term).get(divisor, 0)
            spread: Polynomial | None = {frozenset(each for each in term if each[0] != divisor): scale}
            for _ in range(left):
                spread = None if spread is None or total is None else product(spread, total)
            if spread is None:
                return terms
            form = plus(form, spread)
        return form

    def _form(self, node: fx.Node) -> Polynomial:
        form: Polynomial | None = None
        if not value_of(node).dtype.is_floating_point:
            pass
        elif rows := row_sum(node):
            form = self._summed(*rows)
        elif source := broadcast_of(node):
            form = self._lifted(source, shape_of(node))
        elif terms := added(node):
            form = self._added(terms, shape_of(node))
        elif parts := multiplied(node):
            form = self._multiplied(parts, shape_of(node))
        small = form is not None and len(form) <= MAX_TERMS
        if form is None or not small or any(abs(power) > MAX_POWER for term in form for _, power in term):
            return _atom(node, shape_of(node))
        return form

    def _lifted(self, part: Part, shape: Shape) -> Polynomial | None:
        """Return the form of a factor, broadcast to a shape; None for a number that is not finite."""
        if isinstance(part, (int, float)):
            return ({ONE: Fraction(part)} if part else {}) if isfinite(part) else None
        if isinstance(part, Factor):
            return {frozenset([(Atom(part.root, part.runs, part.inverted), 1)]): Fraction(1)}
        form = lifted(self._known[root(part)], factor_of(part, shape).runs)
        return _atom(part, shape) if form is None else form

    def _multiplied(self, parts: list[tuple[Part, bool]], shape: Shape) -> Polynomial | None:
        form: Polynomial | None = {ONE: Fraction(1)}
        for part, divides in parts:
            part_form = self._lifted(part, shape)
            if part_form is not None and divides:
                turned = inverse(part_form)
                atom_inverse = inverse(_atom(part, shape)) if isinstance(part, fx.Node) else None
                part_form = atom_inverse if turned is None else turned
            if part_form is None or form is None:
                return None
            form = product(form, part_form)
        return form

    def _added(self, terms: list[tuple[Part, float]], shape: Shape) -> Polynomial | None:
        form: Polynomial = {}
        for part, scale in terms:
            part_form = self._lifted(part, shape) if isfinite(scale) else None
            if part_form is None:
                return None
            form = plus(form, {term: Fraction(scale) * each for term, each in part_form.items() if scale})
        return form

    # Sums over rows ---------------------------------------------------------------------------------------------------

    def _summed(self, summand: fx.Node, divisor: sympy.Expr) -> Polynomial | None:
        *shape, size = shape_of(summand)
        if not divisor.is_Integer:
            return None
        each = Fraction(1, int(divisor))
        form: Polynomial = {}
        for monomial, scale in self._known[root(summand)].items():
            rows, over = split(monomial, size)
            terms = product({rows: scale * each}, self._row(over, count(tuple(shape)), size))
            if terms is None:
                return None
            form = plus(form, terms)
        return form

    def _row(self, over: Monomial, rows: sympy.Expr, size: sympy.Expr) -> Polynomial:
        """Return Σ of a monomial over a last axis."""
        if not over and size.is_Integer:
            return {ONE: Fraction(int(size))}
        whole = merged_runs([(True, rows)])
        bilinear = self._bilinear(over, whole, size)
        return bilinear or {frozenset([(Atom(Summed(over, size), whole), 1)]): Fraction(1)}

    def _bilinear(self, over: Monomial, whole: Runs, size: sympy.Expr) -> Polynomial | None:
        """Return Σ_s X·p of a matrix product X = a·B, as Σ_s Σ_d a·B·p; None if there is no such factor."""
        if self._nested >= MAX_NESTED:
            return None
        nodes = [(atom.source, atom, power) for atom, power in over if isinstance(atom.source, fx.Node)]
        for x, atom, power in sorted(nodes, key=lambda each: each[0].name):
            if not is_product(x) or power != 1 or shape_of(x)[-1] != size:
                continue
            if atom.runs != factor_of(x, shape_of(x)).runs:
                continue
            a, right = operands(x)
            (matrix, transposed), short = matrix_root(right), shape_of(a)[-1]
            self._nested += 1
            terms = self.of(a)
            self._nested -= 1
            form: Polynomial = {}
            for monomial, scale in terms.items():
                rows, along = split(monomial, short)
                p = over - {(atom, power)}
                bilinear = (
                    Bilinear(matrix, size, short, p, along) if transposed else Bilinear(matrix, short, size, along, p)
                )
                both = times(rows, frozenset([(Atom(bilinear, whole), 1)]))
                form = form if both is None else plus(form, {both: scale})
            return form
        return None


def _parts(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that the form of a node is computed from."""
    if not value_of(node).dtype.is_floating_point:
        return []
    if rows := row_sum(node):
        parts: list[Part] = [rows[0]]
    elif source := broadcast_of(node):
        parts = [source]
    else:
        parts = [part for part, _ in added(node) or multiplied(node)]
    return [root(part) for part in parts if isinstance(part, fx.Node)]


def _atom(node: fx.Node, shape: Shape) -> Polynomial:
    """Return a tensor as one atom, broadcast to a shape."""
    factor = factor_of(node, shape)
    return {frozenset([(Atom(factor.root, factor.runs), 1)]): Fraction(1)}
