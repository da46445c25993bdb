"""Factors of the tensors of an ATen graph, whatever the views and conversions in between.

Input: an fx node whose `val` has its shape; output: a `Product` of `Factor`s that compare equal if they hold the same
numbers at the same points.  Nothing is refused: a tensor that is not a product is one factor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import getitem
from typing import TypeAlias, cast

import sympy
import torch
from torch import fx

from fusion.joint.facts import axis_order, constant_of, keeps_elements, matrices
from fusion.lowering.sizes import sizes_of
from fusion.lowering.value import Shape

aten = torch.ops.aten

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
class Product:
    """`scale` · Π over / Π under.  Nothing is cancelled within: zeros and infinities are kept."""

    scale: float = 1.0
    over: Counter[Factor] = field(default_factory=Counter)
    under: Counter[Factor] = field(default_factory=Counter)

    def __mul__(self, other: Product) -> Product:
        return Product(self.scale * other.scale, self.over + other.over, self.under + other.under)

    def without(self, other: Product) -> Product | None:
        """Divide by `other`; None if that is not part of this product."""
        if other.scale == 0 or not (other.over <= self.over and other.under <= self.under):
            return None
        scale = self.scale / other.scale
        if not math.isfinite(scale):
            return None
        return Product(scale, self.over - other.over, self.under - other.under)


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
    """Return whether this is a node with one tensor as result."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_row_sum(node: fx.Node) -> bool:
    """Return whether this is a sum of floats over the last axis, which is not of size 1."""
    return node.target is aten.sum.dim_IntList and _is_over_rows(node)


def is_row_mean(node: fx.Node) -> bool:
    """Return whether this is a mean over the last axis, which is not of size 1."""
    return node.target is aten.mean.dim and _is_over_rows(node)


def _is_over_rows(node: fx.Node) -> bool:
    if not is_tensor(node.args[0]):
        return False
    summand, dims = cast(fx.Node, node.args[0]), node.args[1]
    rank = value_of(summand).ndim
    last = isinstance(dims, (list, tuple)) and len(dims) == 1 and rank > 0 and cast(int, dims[0]) % rank == rank - 1
    return last and value_of(summand).dtype.is_floating_point and shape_of(summand)[-1] != 1


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
    """Return runs without those of length 1, with equal neighbours merged."""
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


def product_of(part: Part, shape: Shape) -> Product:
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
                if part.target is aten.expand.default:
                    part = cast(fx.Node, part.args[0])
            part = factor_of(part, shape)
        (under if divides else over)[part] += 1
    return Product(scale, over, under)


def multiplied(node: fx.Node) -> list[tuple[Part, bool]]:
    """Return the factors of a tensor, each with whether it divides; empty if it is not a product."""
    target, shape = node.target, shape_of(node)
    args = [cast(Part, arg) for arg in node.args if is_tensor(arg) or isinstance(arg, (int, float))]
    if not value_of(node).dtype.is_floating_point:
        return []
    if target is getitem:
        return _dropped_out(node)
    if len(args) != len(node.args):
        return []
    if target in (aten.mul.Tensor, aten.mul.Scalar):
        return [(args[0], False), (args[1], False)]
    if target in (aten.div.Tensor, aten.div.Scalar) and args[1] != 0:
        return [(args[0], False), (args[1], True)]
    if target is aten.neg.default:
        return [(args[0], False), (-1, False)]
    if target is aten.reciprocal.default:
        return [(args[0], True)]
    if target is aten.pow.Tensor_Scalar and args[1] in (2, 3):
        return [(args[0], False)] * int(cast(float, args[1]))
    return _masked(node, args, shape)


def _masked(node: fx.Node, args: list[Part], shape: Shape) -> list[tuple[Part, bool]]:
    """Return the factors of a tensor that a mask sets to 0; empty if it is not of this kind.

    A mask that excludes non-finite values makes them 0, where a product would make them NaN.
    """
    target = node.target
    if target is aten.masked_fill.Scalar and args[2] == 0:
        return [(args[0], False), (factor_of(cast(fx.Node, args[1]), shape, inverted=True), False)]
    if target is aten.where.self and constant_of(args[2]) == 0:
        return [(args[1], False), (factor_of(cast(fx.Node, args[0]), shape), False)]
    if target is aten.where.self and constant_of(args[1]) == 0:
        return [(args[2], False), (factor_of(cast(fx.Node, args[0]), shape, inverted=True), False)]
    if target is aten.native_dropout_backward.default:
        return [(args[0], False), (args[1], False), (args[2], False)]
    return []


def _dropped_out(node: fx.Node) -> list[tuple[Part, bool]]:
    """Return the factors of a dropout's first result; its second is the mask."""
    source, position = node.args
    if not isinstance(source, fx.Node) or source.target is not aten.native_dropout.default or position != 0:
        return []
    dropped, probability, training = source.args
    masks = [user for user in source.users if user.args[1] == 1]
    if not masks or training is False or not isinstance(probability, (int, float)) or probability >= 1:
        return []
    return [(cast(fx.Node, dropped), False), (masks[0], False), (1 - probability, True)]
