"""Normal forms: a float tensor of an ATen graph as a polynomial, which is the same for tensors that are the same.

Two tensors that are the same sum in the algebra of reals, and no more than multiplied, added, summed over their last
axis and taken through matrix products on the way, have equal forms; one that is 0 has no terms.  So

    Σ_j (g_j - Σ_k g_k·e_k / l)·e_j / l      with l = Σ_j e_j

is Σ_j g_j·e_j / l - (Σ_k g_k·e_k)·l / l² and vanishes.  What is beyond this algebra is an atom of it: itself, and
nothing is known of it.  Of a sum over a row, the terms are apart, and what does not vary along the row is before it.

Input: an fx node whose `val` says its shape.  Nothing is refused: what is too long is one atom.  Conversions from one
float to another are seen through, as they round and do no more.
"""

from __future__ import annotations

from fractions import Fraction
from math import isfinite
from typing import cast

import sympy
import torch
from torch import fx

from fusion.joint.factors import (
    PRODUCTS,
    Factor,
    Part,
    Runs,
    count,
    factor_of,
    is_row_mean,
    is_row_sum,
    is_tensor,
    joined,
    matrix_root,
    multiplied,
    operands,
    root,
    shape_of,
    value_of,
)
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

aten = torch.ops.aten

MAX_POWER = 8
MAX_DIVISORS = 4
"""How many sums that divide are multiplied out."""
MAX_NESTED = 24
"""How many matrix products are taken apart within each other."""


class Forms:
    """The polynomials of the tensors of one graph.

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
        """The form of a tensor, over its elements in their order."""
        todo = [root(node)]
        while todo:
            if todo[-1] in self._known:
                todo.pop()
            elif missing := [part for part in _parts(todo[-1]) if part not in self._known]:
                todo += missing
            else:
                self._known[todo[-1]] = self._made(todo[-1])
        return self._known[root(node)]

    def vanishes(self, node: fx.Node) -> bool:
        """Is a tensor 0 wherever what it is divided by is not?"""
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
        """A polynomial times what divides it, a sum, which is spread; as it was if that is too long."""
        assert isinstance(divisor.source, fx.Node)
        total = lifted(self._known[divisor.source], divisor.runs)
        most = max(-power for term in terms for atom, power in term if atom == divisor)
        made: Polynomial = {}
        for term, scale in terms.items():
            left = most + dict(term).get(divisor, 0)
            spread: Polynomial | None = {frozenset(each for each in term if each[0] != divisor): scale}
            for _ in range(left):
                spread = None if spread is None or total is None else product(spread, total)
            if spread is None:
                return terms
            made = plus(made, spread)
        return made

    def _made(self, node: fx.Node) -> Polynomial:
        made: Polynomial | None = None
        if not value_of(node).dtype.is_floating_point:
            pass
        elif is_row_sum(node) or is_row_mean(node):
            made = self._summed(node)
        elif node.target is aten.expand.default:
            made = self._given(cast(fx.Node, node.args[0]), shape_of(node))
        elif node.target in (aten.add.Tensor, aten.sub.Tensor):
            made = self._added(node)
        elif parts := multiplied(node):
            made = self._multiplied(parts, shape_of(node))
        small = made is not None and len(made) <= MAX_TERMS
        if made is None or not small or any(abs(power) > MAX_POWER for term in made for _, power in term):
            return _alone(node, shape_of(node))
        return made

    def _given(self, part: Part, shape: Shape) -> Polynomial | None:
        """A part of a tensor of some shape, to which it is broadcast; None of a number that is not finite."""
        if isinstance(part, (int, float)):
            return ({ONE: Fraction(part)} if part else {}) if isfinite(part) else None
        if isinstance(part, Factor):
            return {frozenset([(Atom(part.root, part.runs, part.inverted), 1)]): Fraction(1)}
        made = lifted(self._known[root(part)], factor_of(part, shape).runs)
        return _alone(part, shape) if made is None else made

    def _multiplied(self, parts: list[tuple[Part, bool]], shape: Shape) -> Polynomial | None:
        made: Polynomial | None = {ONE: Fraction(1)}
        for part, divides in parts:
            given = self._given(part, shape)
            if given is not None and divides:
                turned = inverse(given)
                alone = inverse(_alone(part, shape)) if isinstance(part, fx.Node) else None
                given = alone if turned is None else turned
            if given is None or made is None:
                return None
            made = product(made, given)
        return made

    def _added(self, node: fx.Node) -> Polynomial | None:
        alpha = node.kwargs.get("alpha", 1)
        parts = [cast(Part, arg) for arg in node.args if is_tensor(arg) or isinstance(arg, (int, float))]
        if len(parts) != len(node.args) or not isinstance(alpha, (int, float)) or not isfinite(alpha):
            return None
        left, right = (self._given(part, shape_of(node)) for part in parts)
        if left is None or right is None:
            return None
        scale = Fraction(alpha) if node.target is aten.add.Tensor else -Fraction(alpha)
        return plus(left, {term: scale * each for term, each in right.items() if scale})

    # Sums over rows ---------------------------------------------------------------------------------------------------

    def _summed(self, node: fx.Node) -> Polynomial | None:
        summand = cast(fx.Node, node.args[0])
        *shape, size = shape_of(summand)
        if is_row_mean(node) and not size.is_Integer:
            return None
        each = Fraction(1, int(size)) if is_row_mean(node) else Fraction(1)
        made: Polynomial = {}
        for monomial, scale in self._known[root(summand)].items():
            rows, over = split(monomial, size)
            terms = product({rows: scale * each}, self._row(over, count(tuple(shape)), size))
            if terms is None:
                return None
            made = plus(made, terms)
        return made

    def _row(self, over: Monomial, rows: sympy.Expr, size: sympy.Expr) -> Polynomial:
        """Σ of a monomial over a last axis."""
        if not over and size.is_Integer:
            return {ONE: Fraction(int(size))}
        whole = joined([(True, rows)])
        taken = self._bilinear(over, whole, size)
        return taken or {frozenset([(Atom(Summed(over, size), whole), 1)]): Fraction(1)}

    def _bilinear(self, over: Monomial, whole: Runs, size: sympy.Expr) -> Polynomial | None:
        """Σ_s X·p of a matrix product X = a·B, as Σ_s Σ_d a·B·p; None if there is none."""
        if self._nested >= MAX_NESTED:
            return None
        nodes = [(atom.source, atom, power) for atom, power in over if isinstance(atom.source, fx.Node)]
        for x, atom, power in sorted(nodes, key=lambda each: each[0].name):
            if x.target not in PRODUCTS or power != 1 or shape_of(x)[-1] != size:
                continue
            if atom.runs != factor_of(x, shape_of(x)).runs:
                continue
            a, right = operands(x)
            (matrix, transposed), short = matrix_root(right), shape_of(a)[-1]
            self._nested += 1
            terms = self.of(a)
            self._nested -= 1
            made: Polynomial = {}
            for monomial, scale in terms.items():
                rows, along = split(monomial, short)
                p = over - {(atom, power)}
                bilinear = (
                    Bilinear(matrix, size, short, p, along) if transposed else Bilinear(matrix, short, size, along, p)
                )
                both = times(rows, frozenset([(Atom(bilinear, whole), 1)]))
                made = made if both is None else plus(made, {both: scale})
            return made
        return None


def _parts(node: fx.Node) -> list[fx.Node]:
    """The tensors that the form of a node is made of."""
    if not value_of(node).dtype.is_floating_point:
        return []
    if is_row_sum(node) or is_row_mean(node) or node.target is aten.expand.default:
        parts: list[object] = [node.args[0]]
    elif node.target in (aten.add.Tensor, aten.sub.Tensor):
        parts = list(node.args)
    else:
        parts = [part for part, _ in multiplied(node)]
    return [root(part) for part in parts if isinstance(part, fx.Node) and is_tensor(part)]


def _alone(node: fx.Node, shape: Shape) -> Polynomial:
    """A tensor as one atom, broadcast to a shape."""
    factor = factor_of(node, shape)
    return {frozenset([(Atom(factor.root, factor.runs), 1)]): Fraction(1)}
