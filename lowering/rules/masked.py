"""Lowers writes of one source for each element where a mask holds: its number is a running sum of the mask."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.checks.checked import required
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, ZERO, FloorDiv, Mod, axis_symbol, simplify
from fusion.lowering.ir.expr import IndexValue
from fusion.lowering.ir.requirements import Requirement
from fusion.lowering.registry import lowers
from fusion.lowering.rules.assembly import placed
from fusion.lowering.rules.collisions import written
from fusion.lowering.rules.formula import Term, eq, literal, where
from fusion.lowering.rules.promotion import convert
from fusion.lowering.rules.scans import cumsum
from fusion.lowering.value import Shape, Value, axes_of, broadcast_shapes, broadcast_to, contiguous_strides, reshape

aten = torch.ops.aten


def _numbered(ctx: Builder, mask: Value, shape: Shape) -> tuple[Term, Term]:
    """(whether the mask holds, the number of earlier elements where it holds), over the flattened elements."""
    flags = reshape(convert(broadcast_to(mask, shape), torch.bool), (sympy.Mul(*shape),))
    return Term(flags.expr), Term(cumsum(ctx, convert(flags, torch.int64), 0).expr) - 1


def numbered_sources(ctx: Builder, x: Value, first: int, mask: Value, values: Value) -> Value:
    """Return the source of each element of x: `values` at the number of the element among those where the mask holds.

    The mask is over the dimensions of x from `first` on, for which `values` has one.  Elsewhere the source is 0.
    """
    held, number = _numbered(ctx, mask, mask.shape)
    flat_index = ZERO
    for k, size in enumerate(mask.shape):
        flat_index = flat_index * size + axis_symbol(first + k)
    total = sympy.Mul(*mask.shape)
    inside, at = (
        Term(Value((total,), term.dtype, x.device, term.expr).view(x.shape, [flat_index]).expr)
        for term in (held, number)
    )
    behind = x.rank - first - mask.rank
    count = values.shape[-behind - 1] if values.rank > behind else ONE
    sources = broadcast_to(values, (*x.shape[:first], count, *x.shape[first + mask.rank :]))
    axes = axes_of(x.shape)
    one = count == 1  # for all elements
    if not one:
        here = Term(IndexValue(flat_index))
        fits = where(eq(here, total - 1), eq(at + 1, count), ~inside | (at < count))
        at = Term(required(at.expr, fits.expr, Requirement.MATCHING_SOURCES))
    index = [*axes[:first], ZERO if one else at.expr, *axes[first + mask.rank :]]
    read = placed(sources, x.shape, index, inside if one else inside & (at < count))
    return Value(x.shape, values.dtype, x.device, read.expr)


@lowers(aten.masked_scatter.default)
def masked_scatter(ctx: Builder, x: Value, mask: Value, source: Value) -> Value:
    """x with the elements of `source`, in order, where the mask holds."""
    if mask.dtype is not torch.bool:
        raise Unsupported(f"a mask of {mask.dtype}")
    shape = broadcast_shapes([x.shape, mask.shape])
    total, count = sympy.Mul(*shape), sympy.Mul(*source.shape)
    held, number = _numbered(ctx, mask, shape)
    number = Term(required(number.expr, (~held | (number < count)).expr, Requirement.ENOUGH_SOURCES))
    read = placed(reshape(source, (count,)), (total,), [number.expr], held & (number < count))
    old = reshape(broadcast_to(x, shape), (total,))
    return reshape(Value((total,), x.dtype, x.device, where(held, read, Term(old.expr)).expr), shape)


@lowers(aten.masked_scatter_backward.default)
def masked_scatter_backward(ctx: Builder, grad: Value, mask: Value, sizes: Sequence[int | sympy.Expr]) -> Value:
    """The gradients where the mask holds, in order, in a tensor of these sizes; 0 behind them."""
    shape = tuple(map(sympy.sympify, sizes))
    whole = broadcast_shapes([grad.shape, mask.shape])
    held, number = _numbered(ctx, mask, whole)
    count = sympy.Mul(*shape)
    zeros = Value((count,), grad.dtype, grad.device, literal(0, grad.dtype))
    source = reshape(broadcast_to(grad, whole), (sympy.Mul(*whole),))
    return reshape(written(ctx, zeros, [number.expr], source, held), shape)


@lowers(aten.nonzero_static.default)
def nonzero_static(ctx: Builder, x: Value, *, size: int | sympy.Expr, fill_value: int = -1) -> Value:
    """The positions of non-zeros of x, one row each; rows beyond their number are filled with `fill_value`."""
    shape = (sympy.sympify(size), sympy.Integer(x.rank))
    filled = Value(shape, torch.int64, x.device, literal(fill_value, torch.int64))
    total = sympy.Mul(*x.shape)
    if 0 in (*shape, total):
        return filled
    held, number = _numbered(ctx, x, x.shape)
    flat, dimension = axis_symbol(0), Term(IndexValue(axis_symbol(1)))
    bounds = {flat: total}
    position = Term(literal(0, torch.int64))
    for k, (step, count) in enumerate(zip(contiguous_strides(x.shape), x.shape, strict=True)):
        digit = simplify(Mod(simplify(FloorDiv(flat, step), bounds), count), bounds)
        position = where(eq(dimension, k), Term(IndexValue(digit)), position)
    source = Value((total, shape[1]), torch.int64, x.device, position.expr)
    return written(ctx, filled, [number.expr, axis_symbol(1)], source, held)
