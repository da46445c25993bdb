"""Represents tensors while a graph is being lowered.

A `Value` is a shape, a dtype and one expression over the axes `i0, i1, …` of that shape.  A tensor in memory is a
load; a view of it is the same load with another index; a constant is a constant.  Nothing is computed or moved until
a value becomes a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch

from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, ZERO, FloorDiv, Mod, Sizes, axis_symbol, simplify, substitute
from fusion.lowering.ir.expr import Expr, Index, Load
from fusion.lowering.ir.sizes import estimate

Shape = tuple[sympy.Expr, ...]

FxValue: TypeAlias = "Value | sympy.Expr | tuple[FxValue | None, ...] | None"
"""The value of an fx node: a tensor, a size, several of these, or nothing."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as an expression over its own axes."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    expr: Expr

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def at(self, index: Sequence[Index], sizes: Sizes) -> Expr:
        """Return the element at `index`, an index per dimension over axes bounded by `sizes`."""
        assert len(index) == self.rank
        return substitute(self.expr, {axis_symbol(k): i for k, i in enumerate(index)}, sizes)

    def view(self, shape: Shape, index: Sequence[Index]) -> Value:
        """Return a value of another shape that reads this one at `index` (over the axes of `shape`)."""
        return Value(shape, self.dtype, self.device, self.at(index, axis_bounds(shape)))

    def buffer(self) -> str | None:
        """Return the buffer that holds this value, element for element; None for a view or a computed value."""
        if isinstance(self.expr, Load) and self.expr.mask is None and self.expr.index == axes_of(self.shape):
            return self.expr.buffer
        return None


def axes_of(shape: Shape) -> tuple[sympy.Symbol, ...]:
    """Return the axis symbols of a shape, one per dimension."""
    return tuple(axis_symbol(k) for k in range(len(shape)))


def axis_bounds(shape: Shape) -> dict[sympy.Symbol, sympy.Expr]:
    """Return axis symbol → size."""
    return dict(zip(axes_of(shape), shape, strict=True))


def contiguous_strides(shape: Shape) -> Shape:
    """Return row-major strides in elements.

    >>> contiguous_strides((sympy.Integer(2), sympy.Integer(3), sympy.Integer(4)))
    (12, 4, 1)
    """
    strides: list[sympy.Expr] = []
    running: sympy.Expr = ONE
    for size in reversed(shape):
        strides.append(running)
        running = running * size if size != 0 else running
    return tuple(reversed(strides))


def slowest_first(strides: Shape) -> list[int]:
    """Return the dimensions of a tensor by decreasing stride, with symbols at a default.

    >>> slowest_first((sympy.Integer(1), sympy.Integer(12), sympy.Integer(3)))
    [1, 2, 0]
    """
    return sorted(range(len(strides)), key=lambda k: (-estimate(strides[k], {}), k))


def dense_strides(order: Sequence[int], shape: Shape) -> Shape:
    """Return the strides of a tensor without gaps, given its dimensions from the slowest to the fastest.

    >>> dense_strides([1, 2, 0], (sympy.Integer(3), sympy.Integer(2), sympy.Integer(4)))
    (1, 12, 3)
    """
    strides = dict(zip(order, contiguous_strides(tuple(shape[k] for k in order)), strict=True))
    return tuple(strides[k] for k in range(len(shape)))


def broadcast_shapes(shapes: Sequence[Shape]) -> Shape:
    """Return the common shape of operands under PyTorch's broadcasting.

    Raises:
        Unsupported: the shapes are not known to agree.
    """
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[sympy.Expr] = [ONE] * rank
    for shape in shapes:
        for k, size in enumerate(shape, start=rank - len(shape)):
            if size == 1 or size == result[k]:
                continue
            if result[k] != 1:
                raise Unsupported(f"cannot see that sizes {result[k]} and {size} are equal")
            result[k] = size
    return tuple(result)


def broadcast_to(value: Value, shape: Shape) -> Value:
    """Broadcast `value` to a shape."""
    if value.shape == shape:
        return value
    skip = len(shape) - value.rank
    index = [
        ZERO if size == 1 and shape[skip + k] != 1 else axis_symbol(skip + k) for k, size in enumerate(value.shape)
    ]
    return value.view(shape, index)


def reshape(value: Value, shape: Shape) -> Value:
    """Reshape `value`, in row-major order, to another shape with the same number of elements."""
    if value.shape == shape:
        return value
    if 0 in shape:
        return value.view(shape, [ZERO] * value.rank)
    bounds = axis_bounds(shape)
    index: list[sympy.Expr] = []
    for old, new in _matching_groups(value.shape, shape):
        sizes = [shape[k] for k in new]
        linear = sympy.Add(*(axis_symbol(k) * s for k, s in zip(new, contiguous_strides(tuple(sizes)), strict=True)))
        old_sizes = [value.shape[k] for k in old]
        for position, (size, stride) in enumerate(zip(old_sizes, contiguous_strides(tuple(old_sizes)), strict=True)):
            digit = simplify(FloorDiv(linear, stride), bounds)
            index.append(digit if position == 0 else simplify(Mod(digit, size), bounds))
    return value.view(shape, index)


def _matching_groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Return the shortest runs of dimensions of `old` and `new` with equal products, in order."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left: list[int] = []
        right: list[int] = []
        a: sympy.Expr = ONE
        b: sympy.Expr = ONE
        while True:
            if left and right and a == b:
                break
            take_left = i < len(old) and (not left or _smaller(a, b) or j >= len(new))
            if take_left:
                a, i = a * old[i], i + 1
                left.append(i - 1)
            elif j < len(new):
                b, j = b * new[j], j + 1
                right.append(j - 1)
            else:
                break
        groups.append((left, right))
    return groups


def _smaller(a: sympy.Expr, b: sympy.Expr) -> bool:
    if a.is_Integer and b.is_Integer:
        return bool(a < b)
    ratio = b / a
    return bool(ratio != 1 and ratio.as_numer_denom()[1] == 1)
