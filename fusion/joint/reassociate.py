"""Replaces a sum over products by a sum that the graph already computes, in another order (reassociation).

This only uses the algebra of finite sums.  With X = A·Bᵀ and Y = P·B, of sizes [i, s] and [i, e],

    Σ_s X·P = Σ_s Σ_e A[i, e]·B[s, e]·P[i, s] = Σ_e A·Y

so that if Y exists and e is short, no tensor of size i × s is needed.  (In the backward of an attention, Y is its
result, and the sum runs over the weights times their gradients.)  The factors of P must be factors of the summand too;
its other factors must not vary along s and are moved out of the sum.  A summand that is itself a sum is summed term by
term, where each term has such a form or is, up to factors without s, the summand of an earlier sum.

It only pays off if X is a tile, which a kernel recomputes.  A library's X is in memory, like P, and their sum is fused
with its other readers.  From Y it would cost a launch, and for equal keys not cancel as eager's does.

Input: a functional ATen graph whose nodes have fake tensors as `val`, which is changed in place.  A sum is unchanged if
it is not over the last axis, if X is not a tile, if Y is missing, later, rounded more than X or not much smaller.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from fusion.joint.factors import (
    Factor,
    Quotient,
    added,
    count,
    is_product,
    matrix_root,
    operands,
    product_of,
    shape_of,
    value_of,
)
from fusion.joint.facts import row_sum
from fusion.joint.recomputation import is_tile
from fusion.joint.writing import write
from fusion.lowering.ir.scalar_ops import HALVES
from fusion.lowering.ir.sizes import elements, size_of
from fusion.lowering.value import Shape

aten = torch.ops.aten

MIN_SHRINKAGE, MIN_SHRINKAGE_HALVES = 4, 1.5
"""The smallest ratio of the sizes of X and Y; in 16 bits, whose own rounding is larger than that of either sum."""
MAX_NESTED = 2
"""How many nested sums a summand is expanded over."""


@dataclass(frozen=True)
class RowSum:
    """`before` · Σ left·right over the last axis, or, without `right`, `before` · left: one number for each row."""

    before: Quotient
    left: fx.Node
    right: fx.Node | None = None


def reassociate(joint: fx.GraphModule) -> None:
    """Replace every sum over a last axis that smaller tensors determine, and remove nodes that only it needs.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> def f(a, b, p):
    ...     return p @ b, (a @ b.t() * p).sum(-1)
    >>> show_graph(reassociate, f, empty(500, 2), empty(600, 2), empty(500, 600))
      mm = mm(p, b)
    - t = t(b)
    - mm_1 = mm(a, t)
    - mul = mul.Tensor(mm_1, p)
    + mul_1 = mul.Tensor(a, mm)
    - sum_1 = sum.dim_IntList(mul, [-1])
    + sum_2 = sum.dim_IntList(mul_1, [-1], True)
    - return mm, sum_1
    + view = view(sum_2, [500])
    + return mm, view
    """
    known = _Known()
    changed = False
    for node in list(joint.graph.nodes):
        if isinstance(node.meta.get("val"), torch.SymInt):
            known.sizes.setdefault(size_of(node.meta["val"]), node)
        elif is_product(node):
            known.add_product(node)
        elif (rows := row_sum(node)) is not None and rows[1] == 1:
            summand, _ = rows
            terms = known.sum_of(summand)
            replacement = None if terms is None else _SumWriter(joint.graph, node, summand, known.sizes).write(terms)
            if replacement is not None:
                node.replace_all_uses_with(replacement)
                changed = True
            known.add_sum(summand, replacement or node)
    if changed:
        joint.graph.eliminate_dead_code()
        joint.recompile()


class _Known:
    """The products, sums and sizes in the part of a graph visited so far."""

    def __init__(self) -> None:
        self.sizes: dict[sympy.Expr, fx.Node] = {}
        self._products: defaultdict[tuple[fx.Node, bool], list[fx.Node]] = defaultdict(list)
        self._sums: list[tuple[Quotient, Shape, fx.Node]] = []

    def add_product(self, node: fx.Node) -> None:
        self._products[matrix_root(operands(node)[1])].append(node)

    def add_sum(self, summand: fx.Node, value: fx.Node) -> None:
        """Record that the sums over the rows of `summand` are available as `value`."""
        shape = shape_of(summand)
        self._sums.append((product_of(summand, shape), shape, value))

    def sum_of(self, summand: fx.Node) -> list[RowSum] | None:
        """Return the sums over rows as a few sums of smaller tensors; None if that is impossible."""
        shape = shape_of(summand)
        terms = self._terms(product_of(summand, shape), shape, MAX_NESTED)
        return terms if terms and any(term.right is not None for term in terms) else None

    def _terms(self, term: Quotient, shape: Shape, nested: int) -> list[RowSum] | None:
        row_sum = self._contraction(term, shape) or self._earlier(term, shape)
        if row_sum is not None:
            return [row_sum]
        for factor in term.over if nested else ():
            if (spread := _spread(term, factor)) is not None:
                rows = [self._terms(each, shape, nested - 1) for each in spread]
                if all(rows):
                    return [row for terms in rows for row in terms or ()]
        return None

    def _contraction(self, term: Quotient, shape: Shape) -> RowSum | None:
        """Return Σ_s X·P·… through Y, for any factor X."""
        for factor in term.over:
            x = factor.root
            if not is_product(x) or not factor.is_whole or shape_of(x)[-1] != shape[-1]:
                continue
            rest = term.without(Quotient(over=Counter([factor])))
            left, right = operands(x)
            source, transposed = matrix_root(right)
            for y in self._products[source, not transposed]:
                p = operands(y)[0]
                if rest is None or not _can_replace(y, x):
                    continue
                before = rest.without(product_of(p, shape_of(p)))
                if before is not None and _has_rows(before, shape):
                    return RowSum(before, left, y)
        return None

    def _earlier(self, term: Quotient, shape: Shape) -> RowSum | None:
        """Return Σ_s P·… where Σ_s P exists."""
        for summed, over, value in self._sums:
            same = over[-1] == shape[-1] and count(over) == count(shape)
            before = term.without(summed) if same else None
            if before is not None and _has_rows(before, shape):
                return RowSum(before, value)
        return None


def _can_replace(y: fx.Node, x: fx.Node) -> bool:
    """Return whether Y has the shape of A, the precision of X, a tile, and much fewer elements."""
    small, large = value_of(y), value_of(x)
    fits = shape_of(y) == shape_of(operands(x)[0]) and small.dtype is large.dtype
    least = MIN_SHRINKAGE_HALVES if large.dtype in HALVES else MIN_SHRINKAGE
    return fits and is_tile(x) and elements(large.shape) >= least * elements(small.shape)


def _has_rows(product: Quotient, shape: Shape) -> bool:
    """Return whether all factors can be moved out of a sum over the last axis."""
    rows = count(shape[:-1])
    return all(factor.is_row(rows) for factor in (*product.over, *product.under))


def _spread(term: Quotient, factor: Factor) -> list[Quotient] | None:
    """Expand a product with a sum as a factor into products; None if the factor is not a sum."""
    rest = term.without(Quotient(over=Counter([factor])))
    if rest is None or not factor.is_whole:
        return None
    shape = shape_of(factor.root)
    products = [(rest * product_of(part, shape), scale) for part, scale in added(factor.root)]
    return [replace(product, scale=scale * product.scale) for product, scale in products] or None


class _SumWriter:
    """Writes the replacement of a sum, in float32 at least, before it."""

    def __init__(self, graph: fx.Graph, node: fx.Node, summand: fx.Node, sizes: dict[sympy.Expr, fx.Node]) -> None:
        self._graph, self._sum, self._sizes = graph, node, sizes
        self._dtype = torch.promote_types(value_of(node).dtype, torch.float32)
        self._shape = (*shape_of(summand)[:-1], sympy.Integer(1))

    def write(self, terms: Iterable[RowSum]) -> fx.Node | None:
        """Return the sum of some rows in the shape and dtype of the sum; None if the graph lacks nodes of its sizes."""
        wanted = (*self._shape, *shape_of(self._sum))
        if not all(size.is_Integer or size in self._sizes for size in wanted):
            return None
        with self._graph.inserting_before(self._sum):
            total: fx.Node | None = None
            for term in terms:
                row = self._row(term)
                total = row if total is None else self._call(aten.add.Tensor, total, row)
            assert total is not None
            return self._cast(self._viewed(total, shape_of(self._sum)), value_of(self._sum).dtype)

    def _row(self, term: RowSum) -> fx.Node:
        row = term.left
        if term.right is not None:
            wide = self._cast(term.left, self._dtype), self._cast(term.right, self._dtype)
            row = self._call(aten.sum.dim_IntList, self._call(aten.mul.Tensor, *wide), [-1], True)
        row = self._cast(self._viewed(row, self._shape), self._dtype)
        if term.before.scale != 1:
            row = self._call(aten.mul.Tensor, row, term.before.scale)
        for factor in term.before.over.elements():
            row = self._call(aten.mul.Tensor, row, self._factor(factor))
        for factor in term.before.under.elements():
            row = self._call(aten.div.Tensor, row, self._factor(factor))
        return row

    def _factor(self, factor: Factor) -> fx.Node:
        """Return a factor outside the sum: one number for each row, or one for all."""
        scalar = count(shape_of(factor.root)) == 1
        node = self._viewed(factor.root, (sympy.Integer(1),) * len(self._shape) if scalar else self._shape)
        if factor.inverted:
            node = self._call(aten.logical_not.default, node)
        return self._cast(node, self._dtype)

    def _viewed(self, node: fx.Node, shape: Shape) -> fx.Node:
        if shape_of(node) == shape:
            return node
        if not value_of(node).is_contiguous():
            node = self._call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self._call(aten.view.default, node, [self._size(size) for size in shape])

    def _size(self, size: sympy.Expr) -> int | fx.Node:
        return int(size) if size.is_Integer else self._sizes[size]

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if value_of(node).dtype is dtype else self._call(aten._to_copy.default, node, dtype=dtype)

    def _call(self, target: OpOverload, *args: object, **kwargs: object) -> fx.Node:
        return write(self._sum, target, *args, **kwargs)
