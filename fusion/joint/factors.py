"""Decomposes tensors of an ATen graph into factors, whatever the views and conversions in between.

Input: an fx node whose `val` has its shape; output: a `Quotient` of `Factor`s that compare equal if they hold the same
numbers at the same points.  Nothing is refused: a tensor that is not a product is one factor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import TypeAlias, cast

import sympy
import torch
from torch import fx

from fusion.joint.facts import (
    axis_order,
    broadcast_of,
    constant_of,
    keeps_elements,
    matrices,
    place_of,
    results_of_call,
    unrounded,
    without_units,
)
from fusion.lowering.ir.expr import Cast, Const, Expr, Load, Op
from fusion.lowering.ir.sizes import sizes_of
from fusion.lowering.value import Shape

Runs: TypeAlias = tuple[tuple[bool, sympy.Expr], ...]
"""A shape as lengths in row-major order, each with whether a tensor varies along it: the pattern of its broadcast."""


@dataclass(frozen=True)
class Factor:
    """A tensor, broadcast to the shape of a product.  A mask counts as 1 and 0; `inverted`, it is 1 where it is false.

    Attributes:
        runs: the shape of the product as lengths in row-major order, each with whether the tensor varies along it.
            Sizes of 1 are omitted and equal neighbours merged: it does not matter how axes are split.
    """

    root: fx.Node
    runs: Runs
    inverted: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it has as many elements as the product."""
        return all(varies for varies, _ in self.runs)

    def is_row(self, rows: sympy.Expr) -> bool:
        """Return whether it is one number for each of the rows, which end with the last axis, or one for all."""
        varying = [size for varies, size in self.runs if varies]
        return not self.runs[-1][0] and varying in ([], [rows]) and self.runs[0][0] is bool(varying)


@dataclass(frozen=True)
class Quotient:
    """`scale` · Π over / Π under.  Nothing is cancelled within: zeros and infinities are kept."""

    scale: float = 1.0
    over: Counter[Factor] = field(default_factory=Counter)
    under: Counter[Factor] = field(default_factory=Counter)

    def __mul__(self, other: Quotient) -> Quotient:
        return Quotient(self.scale * other.scale, self.over + other.over, self.under + other.under)

    def without(self, other: Quotient) -> Quotient | None:
        """Divide by `other`; None if that is not part of this product."""
        if other.scale == 0 or not (other.over <= self.over and other.under <= self.under):
            return None
        scale = self.scale / other.scale
        if not math.isfinite(scale):
            return None
        return Quotient(scale, self.over - other.over, self.under - other.under)


def value_of(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of a node."""
    return cast(torch.Tensor, node.meta["val"])


def shape_of(node: fx.Node) -> Shape:
    """Return the sizes of a node's tensor, as expressions."""
    return sizes_of(value_of(node).shape)


def count(shape: Shape) -> sympy.Expr:
    """Return the number of elements."""
    return sympy.Mul(*shape)


def is_tensor(node: object) -> bool:
    """Return whether this is an fx node whose result is one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_product(node: fx.Node) -> bool:
    """Return whether this is a product of two matrices, or of batches of them."""
    return matrices(node) is not None


def operands(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the two operands of a matrix product."""
    pair = matrices(product)
    assert pair is not None
    return pair


# Origins of elements ------------------------------------------------------------------------------------------------


def root(node: fx.Node) -> fx.Node:
    """Return the earliest tensor with the same elements in the same order, up to conversion to another float."""
    while node.args and is_tensor(node.args[0]):
        source = cast(fx.Node, node.args[0])
        if count(shape_of(node)) != count(shape_of(source)) or not keeps_elements(node, source):
            break
        node = source
    return node


def matrix_root(operand: fx.Node) -> tuple[fx.Node, bool]:
    """Return the tensor whose matrices an operand of a matrix product is a view of, and whether it is transposed."""
    shape = list(shape_of(operand)[-2:])
    node, transposed = root(operand), False
    while (order := axis_order(node)) is not None:
        source = cast(fx.Node, node.args[0])
        ordered, sizes = sorted(order), [size for size in shape_of(node) if size != 1]
        if sizes[-2:] != shape or order != [*ordered[:-2], *reversed(ordered[-2:])]:
            break
        node, transposed = root(source), not transposed
        shape.reverse()
    return node, transposed


# Products -------------------------------------------------------------------------------------------------------------


def factor_of(node: fx.Node, shape: Shape, *, inverted: bool = False) -> Factor:
    """Return a tensor as one factor of a product of some shape, to which it is broadcast."""
    own = shape_of(node)
    padded = (*[sympy.Integer(1)] * (len(shape) - len(own)), *own)
    runs = [(bool(own_size == size), size) for own_size, size in zip(padded, shape, strict=True)]
    return Factor(root(node), merged_runs(runs), inverted)


def merged_runs(runs: Iterable[tuple[bool, sympy.Expr]]) -> Runs:
    """Return runs longer than 1, with equal neighbours merged."""
    merged: list[tuple[bool, sympy.Expr]] = []
    for varies, size in runs:
        if size == 1:
            continue
        if merged and merged[-1][0] == varies:
            merged[-1] = (varies, merged[-1][1] * size)
        else:
            merged.append((varies, size))
    return tuple(merged)


Part: TypeAlias = "Factor | fx.Node | int | float"


def product_of(part: Part, shape: Shape) -> Quotient:
    """Decompose a number or a tensor, broadcast to a shape, into factors, as far as it is a product."""
    scale, over, under = 1.0, Counter[Factor](), Counter[Factor]()
    todo: list[tuple[Part, Shape, bool]] = [(part, shape, False)]
    while todo:
        part, shape, divides = todo.pop()
        if isinstance(part, (int, float)):
            scale = scale / part if divides else scale * part
            continue
        if isinstance(part, fx.Node):
            if count(shape_of(part)) == count(shape):
                part = root(part)
                shape = shape_of(part)
                if parts := multiplied(part):
                    todo += [(each, shape, divides != below) for each, below in parts]
                    continue
                part = broadcast_of(part) or part
            part = factor_of(part, shape)
        (under if divides else over)[part] += 1
    return Quotient(scale, over, under)


# Products and sums that a call computes -------------------------------------------------------------------------------


def multiplied(node: fx.Node) -> list[tuple[Part, bool]]:
    """Return the factors that a call multiplies, each with whether it divides; empty if it is not a product.

    A selection between x and 0 is x times its condition; where that excludes a non-finite value, the selection is 0 but
    the product NaN.

    >>> from fusion.inspect.examples import traced
    >>> graph = traced(lambda x, y: -x / y, torch.empty(3, 4), torch.empty(4)).graph
    >>> [multiplied(node) for node in graph.nodes if node.op == "call_function"]
    [[(x, False), (-1, False)], [(neg, False), (y, True)]]
    """
    elements = _elements(node)
    if elements is None or not isinstance(elements.expr, Op):
        return []
    parts: list[tuple[Part, bool]] = []
    for part, divides in elements.factors(elements.expr):
        if part is None or (divides and part == 0):
            return []
        parts.append((part, divides))
    return parts


def added(node: fx.Node) -> list[tuple[Part, float]]:
    """Return the two terms that a call adds, each with its coefficient; empty if it is not a sum.

    >>> from fusion.inspect.examples import traced
    >>> graph = traced(lambda x, y: torch.sub(x, y, alpha=2), torch.empty(3, 4), torch.empty(4)).graph
    >>> [added(node) for node in graph.nodes if node.op == "call_function"]
    [[(x, 1.0), (y, -2.0)]]
    """
    elements = _elements(node)
    expr = None if elements is None else elements.expr
    if elements is None or not isinstance(expr, Op) or expr.name not in ("add", "sub"):
        return []
    left, right = (elements.scaled(arg) for arg in expr.args)
    if left is None or right is None:
        return []
    return [left, (right[0], right[1] if expr.name == "add" else -right[1])]


@dataclass(frozen=True)
class _Elements:
    """The float elements of a call's result, as an expression over its operands.

    Attributes:
        others: expressions of the call's other results, each with its node.
    """

    expr: Expr
    shape: Shape
    operands: Mapping[str, fx.Node]
    others: Mapping[Expr, fx.Node]

    def part(self, expr: Expr) -> Part | None:
        """Return the number or the operand that an expression is, at the same point or broadcast."""
        while isinstance(expr, Cast) and expr.dtype.is_floating_point and expr.dtype.itemsize > 1:
            expr = expr.arg
        if isinstance(expr, Const):
            return expr.value
        source = self.operands.get(expr.buffer) if isinstance(expr, Load) else None
        if source is not None and place_of(source, self.shape) is expr:
            return source
        return self.others.get(expr)

    def factors(self, expr: Expr, *, divides: bool = False) -> Iterator[tuple[Part | None, bool]]:
        """Yield the factors of an expression, each with whether it divides; None for a computed factor.

        The names of these operations are the subject: no column of the scalar operations tells a product from other
        linear operations.
        """
        match unrounded(expr):
            case Op(name="mul" | "truediv" as name, args=(left, right)):
                yield from self.factors(left, divides=divides)
                yield from self.factors(right, divides=divides != (name == "truediv"))
            case Op(name="neg", args=(arg,)):
                yield from self.factors(arg, divides=divides)
                yield -1, False
            case Op(name="where", args=(condition, kept, zero)) if self._is_zero(zero):
                yield from self.factors(kept, divides=divides)
                yield self._mask(condition), divides
            case Op(name="where", args=(condition, zero, kept)) if self._is_zero(zero):
                yield from self.factors(kept, divides=divides)
                yield self._mask(condition, inverted=True), divides
            case other:
                yield self.part(other), divides

    def scaled(self, expr: Expr) -> tuple[Part, float] | None:
        """Return the number or operand that an expression multiplies by a number, and that number."""
        scale, arg = 1.0, unrounded(expr)
        if isinstance(arg, Op) and arg.name == "mul" and isinstance(arg.args[0], Const):
            scale, arg = arg.args[0].value, arg.args[1]
        part = self.part(arg)
        return None if part is None else (part, scale)

    def _is_zero(self, expr: Expr) -> bool:
        part = self.part(expr)
        return part is not None and not isinstance(part, Factor) and constant_of(part) == 0

    def _mask(self, condition: Expr, *, inverted: bool = False) -> Factor | None:
        part = self.part(condition)
        return factor_of(part, self.shape, inverted=inverted) if isinstance(part, fx.Node) else None


def _elements(node: fx.Node) -> _Elements | None:
    """Return the elements of a result as an expression; None if they are not floats or need folds or library calls."""
    if not is_tensor(node) or not value_of(node).dtype.is_floating_point:
        return None
    call = cast(fx.Node, node.args[0]) if node.target is getitem else node
    values = results_of_call(call)
    value = values.get(node)
    if value is None:
        return None
    others = {without_units(each.expr, each.shape): other for other, each in values.items() if other is not node}
    operands = {arg.name: arg for arg in call.all_input_nodes if is_tensor(arg)}
    return _Elements(unrounded(without_units(value.expr, value.shape)), value.shape, operands, others)
