"""Lowers embedding bags: rows of a table, summed or averaged bag by bag.

`offsets` holds the first index of each bag.  A row determines its bag by binary search, and is added to it; bags of
equal length, such as the rows of a table of indices, are reductions along a dimension.  The gradient of a row is that
of its bag, or of those bags of which it is the maximum, element by element.  Gradients divided by the frequency of a
row are refused.
"""

from __future__ import annotations

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.checks.checked import checked
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, FloorDiv, axis_symbol, coefficient
from fusion.lowering.ir.error_messages import Wording
from fusion.lowering.ir.expr import Expr, Index, IndexValue, const, guarded
from fusion.lowering.ir.requirements import Requirement
from fusion.lowering.ir.scalar_ops import identity
from fusion.lowering.registry import lowers
from fusion.lowering.rules.assembly import placed
from fusion.lowering.rules.collisions import folded
from fusion.lowering.rules.formula import Term, eq, literal, maximum, where
from fusion.lowering.rules.gather import position
from fusion.lowering.rules.promotion import combine, convert, requiring, rounded, widen
from fusion.lowering.rules.search import bucketize
from fusion.lowering.value import Value

aten = torch.ops.aten

SUM, MEAN, MAX = range(3)


def _check(scale_grad_by_freq: bool) -> None:
    if scale_grad_by_freq:
        raise Unsupported("gradients divided by how often a row was looked up")


def _length(indices: Value, offsets: Value, count: sympy.Expr) -> sympy.Expr | None:
    """Return the number of indices in each bag, if the offsets are known to be equally spaced."""
    begins, axis = convert(offsets, torch.int64).expr, axis_symbol(0)
    if not isinstance(begins, IndexValue):
        return None
    length = indices.shape[0] if count == ONE else coefficient(begins.index, axis)
    if length is None or not length.is_positive or sympy.expand(length * count - indices.shape[0]) != 0:
        return None
    return length if count == ONE or begins.index == length * axis else None


def _bags(ctx: Builder, indices: Value, offsets: Value, length: sympy.Expr | None) -> Value:
    """Return the bag of each index (int64) by counting the bags that begin no later; the first offset must be 0."""
    if length is not None:
        return Value(indices.shape, torch.int64, indices.device, IndexValue(FloorDiv(axis_symbol(0), length)))
    at = Value(indices.shape, torch.int64, indices.device, IndexValue(axis_symbol(0)))
    later_bags = bucketize(ctx, at, _ascending(convert(offsets, torch.int64), indices.shape[0]), right=True)
    return ctx.map(combine(lambda n: Term(checked((n - 1).expr, offsets.shape[0], 0, wrap=False)), later_bags))


def _ascending(offsets: Value, count: sympy.Expr) -> Value:
    """Return the offsets of bags, which have to ascend from 0, up to `count` at most."""
    axis = axis_symbol(0)
    is_later = Term(IndexValue(axis)) > 0
    before = placed(offsets, offsets.shape, [axis - 1], is_later)
    previous = Value(offsets.shape, torch.int64, offsets.device, before.expr)

    offsets = requiring(Requirement.OFFSETS, lambda at, last: ~is_later | (at >= last), offsets, previous)
    offsets = requiring(Requirement.LAST_OFFSET, lambda at: at <= count, offsets)
    return requiring(Requirement.FIRST_OFFSET, lambda at: is_later | eq(at, 0), offsets)


def _counted(indices: Value, padding_idx: int) -> Term | None:
    """Return where an index counts: everywhere but at the padding; None if there is no padding."""
    return None if padding_idx < 0 else ~eq(Term(convert(indices, torch.int64).expr), padding_idx)


def _sizes(
    ctx: Builder, bags: Value, indices: Value, count: sympy.Expr, padding_idx: int, length: sympy.Expr | None
) -> Value:
    """Return how many indices that are not padding each bag has."""
    if length is not None and padding_idx < 0:
        return Value((count,), torch.int64, bags.device, IndexValue(length))
    zeros = Value((count,), torch.int64, bags.device, const(0, torch.int64))
    ones = Value(bags.shape, torch.int64, bags.device, const(1, torch.int64))
    return folded(ctx, "sum", zeros, [bags.expr], ones, _counted(indices, padding_idx))


def _looked_up(indices: Value, weight: Value) -> Value:
    """Return the rows of the table that the indices name, checked as in eager."""
    at = position(convert(indices, torch.int64), weight.shape[0], 0, wrap=False, wording=Wording.BAG)
    return Value(indices.shape, torch.int64, indices.device, at if isinstance(at, Expr) else IndexValue(at))


def _of_bags(value: Value, bags: Value) -> Value:
    """Read `value` for the bag (and column) of each index; 0 for indices behind the last bag."""
    at, target = Term(bags.expr), _target(bags)[: value.rank]
    read = placed(value, bags.shape, target, at < value.shape[0])
    return Value(bags.shape, value.dtype, value.device, read.expr)


def _target(bags: Value) -> list[Index]:
    """Return the position in a result, of a row per bag, that each index and column contributes to."""
    return [bags.expr, axis_symbol(1)]


def _rows(bags: Value, width: sympy.Expr) -> Value:
    """Broadcast a value per index along its row."""
    return bags.view((bags.shape[0], width), [axis_symbol(0)])


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    ctx: Builder,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Value, ...]:
    """(the sum, mean or maximum of each bag, the bag of each index, the sizes of the bags, the positions of maxima)."""
    _check(scale_grad_by_freq)
    metas = ctx.current.meta["val"]
    count = offsets.shape[0] - (1 if include_last_offset else 0)
    width = weight.shape[1]
    length = _length(indices, offsets, count)
    bags = _bags(ctx, indices, offsets, length)
    at = _rows(_looked_up(indices, weight), width)
    looked_up = widen(weight.view(at.shape, [at.expr, axis_symbol(1)]))
    if per_sample_weights is not None:
        looked_up = combine(lambda row, by: row * by, looked_up, _rows(widen(per_sample_weights), width))
    held = _counted(at, padding_idx)
    sizes = _sizes(ctx, bags, indices, count, padding_idx, length)
    along = sizes.view((count, width), [axis_symbol(0)])
    largest = None
    if mode == MAX:
        total, largest = _largest(ctx, looked_up, at, _rows(bags, width), along, held)
    elif length is not None:
        parts = looked_up if held is None else combine(lambda row: where(held, row, 0), looked_up)
        index = [axis_symbol(0) * length + axis_symbol(1), axis_symbol(2)]
        total = ctx.reduce("sum", [parts.view((count, length, width), index)], [1])
    else:
        zeros = Value((count, width), looked_up.dtype, weight.device, literal(0, looked_up.dtype))
        total = folded(ctx, "sum", zeros, [_rows(bags, width).expr, axis_symbol(1)], looked_up, held)
    if mode == MEAN:
        total = combine(lambda t, n: t / maximum(n, 1).to(t.dtype), total, along)
    kept = [_as(meta, value) for meta, value in zip(metas[1:], (bags, sizes, largest), strict=True)]
    return (rounded(total, weight.dtype), *kept)


def _largest(
    ctx: Builder, rows: Value, names: Value, bags: Value, sizes: Value, held: Term | None
) -> tuple[Value, Value]:
    """Return (the maximum of each bag and column, the first row that attains it); 0 for bags without a row.

    `rows` holds the rows of the table, `names` their positions in it and `bags` the bag of each; `sizes` has the shape
    of the result.
    """
    target = _target(bags)
    lowest = Value(sizes.shape, rows.dtype, rows.device, literal(identity("max", rows.dtype), rows.dtype))
    top = folded(ctx, "max", lowest, target, rows, held)
    order = Value(rows.shape, torch.int64, rows.device, IndexValue(axis_symbol(0)))
    same = eq(Term(rows.expr), Term(top.view(rows.shape, target).expr))
    none = Value(sizes.shape, torch.int64, rows.device, literal(identity("min", torch.int64), torch.int64))
    first = folded(ctx, "min", none, target, order, same if held is None else same & held)
    filled = Term(sizes.expr) > 0
    attained_at = Term(guarded(names.view(sizes.shape, [first.expr, axis_symbol(1)]).expr, filled.expr))
    empty = combine(lambda n, t: where(n > 0, t, 0), sizes, top)
    return empty, Value(sizes.shape, torch.int64, rows.device, where(filled, attained_at, 0).expr)


def _as(meta: torch.Tensor, value: Value | None) -> Value:
    """Return `value` in eager's shape, which is sometimes empty or one longer; zeros for a value that is None."""
    shape = tuple(map(sympy.sympify, meta.shape))
    if value is None or 0 in shape:
        return Value(shape, meta.dtype, meta.device, literal(0, meta.dtype))
    if shape == value.shape:
        return convert(value, meta.dtype)
    at = Term(IndexValue(axis_symbol(0)))
    inside = Term(convert(value, meta.dtype).expr)
    if len(shape) != 1:
        raise Unsupported("bags in another layout")
    held = at < value.shape[0]
    return Value(shape, meta.dtype, meta.device, where(held, Term(guarded(inside.expr, held.expr)), 0).expr)


@lowers(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    ctx: Builder,
    grad: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    bag_size: Value,
    maximum_indices: Value,
    num_weights: int | sympy.Expr,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Value | None,
    padding_idx: int = -1,
) -> Value:
    """The gradient of the table: for each row, the sum of the gradients of the bags that contain it."""
    _check(scale_grad_by_freq)
    if sparse:
        raise Unsupported("sparse gradients")
    width = grad.shape[1]
    length = _length(indices, offsets, grad.shape[0])
    bags = _bags(ctx, indices, offsets, length)
    zeros = Value((sympy.sympify(num_weights), width), grad.dtype, grad.device, literal(0, grad.dtype))
    if mode == MAX:
        sizes = _sizes(ctx, bags, indices, grad.shape[0], padding_idx, length).view(grad.shape, [axis_symbol(0)])
        place = convert(maximum_indices, torch.int64)
        return folded(ctx, "sum", zeros, [place.expr, axis_symbol(1)], grad, Term(sizes.expr) > 0)
    along = _rows(bags, width)
    parts = widen(_of_bags(grad, along))
    if mode == MEAN:
        sizes = _sizes(ctx, bags, indices, grad.shape[0], padding_idx, length)
        number = _of_bags(sizes, along)
        parts = combine(lambda part, n: part / maximum(n, 1).to(part.dtype), parts, number)
    if per_sample_weights is not None:
        parts = combine(lambda part, by: part * by, parts, _rows(widen(per_sample_weights), width))
    at = _rows(convert(indices, torch.int64), width)
    return folded(ctx, "sum", zeros, [at.expr, axis_symbol(1)], parts, _counted(at, padding_idx))


@lowers(aten._embedding_bag_per_sample_weights_backward.default)
def per_sample_weights_backward(
    ctx: Builder,
    grad: Value,
    weight: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    mode: int,
    padding_idx: int = -1,
) -> Value:
    """The gradient of the weights of samples: for each index, the dot product of its bag's gradient and its row."""
    width = grad.shape[1]
    along = _rows(_bags(ctx, indices, offsets, _length(indices, offsets, grad.shape[0])), width)
    at = _rows(_looked_up(indices, weight), width)
    parts = widen(_of_bags(grad, along))
    rows = widen(weight.view(along.shape, [at.expr, axis_symbol(1)]))
    products = combine(lambda a, b: a * b, parts, rows)
    held = _counted(at, padding_idx)
    if held is not None:
        value = where(held, Term(products.expr), 0)
        products = Value(products.shape, products.dtype, products.device, value.expr)
    return rounded(ctx.reduce("sum", [products], [1]), grad.dtype)
