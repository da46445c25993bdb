"""Lowers scatters to nodes: any number of sources, each with an index into a tensor; several may have the same index.

Input: a tensor, the indices of the sources (one for each of its dimensions, over the axes of the sources) and the
sources; output: the tensor with the sources written to it or folded into it.  Narrow types are accumulated in 32 bits
and rounded once.  Nothing is written at an index out of range; rules make eager's checks fail there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from fusion.lowering.builder import Builder
from fusion.lowering.checks.checked import is_within, wrapped
from fusion.lowering.ir.expr import Expr, Index, IndexValue, Op, const
from fusion.lowering.ir.scalar_ops import CHECKED, JoinName, ScatterName, identity
from fusion.lowering.rules.formula import Term, both, eq, literal, maximum, minimum, where
from fusion.lowering.rules.promotion import combine, convert, rounded
from fusion.lowering.value import Shape, Value

aten = torch.ops.aten

JOINS: dict[JoinName, Callable[[Term, Term], Term]] = {
    "sum": Term.__add__,
    "prod": Term.__mul__,
    "max": maximum,
    "min": minimum,
}


def updates_input(ctx: Builder) -> bool:
    """Return whether the result of the current call is copied back into its first input, as an updated cache is.

    Nothing else may read that input, so that the update can be done in place.
    """
    x = ctx.current.args[0]
    if not isinstance(x, fx.Node) or x.op != "placeholder":
        return False
    others = [user for user in x.users if user is not ctx.current and not _is_replaced(user)]
    return len(others) == 1 and others[0].target is aten.copy_.default and others[0].args == (x, ctx.current)


def _is_replaced(view: fx.Node) -> bool:
    """Return whether a view is only overwritten, so that nothing but its shape is read."""
    if view.op != "call_function" or not view.users:
        return False
    return all((user.target is aten.copy.default and user.args[0] is view) or _is_replaced(user) for user in view.users)


def written(ctx: Builder, x: Value, place: Sequence[Index], source: Value, condition: Term | None = None) -> Value:
    """Write each source to its index in `x`, where `condition` holds; of sources with one index, any one stays."""
    place, inside = _inside(x.shape, place, source.shape, condition)
    return ctx.scatter("store", x, source.shape, place, source.expr, None if inside is None else inside.expr)


def folded(
    ctx: Builder,
    op: JoinName,
    x: Value,
    place: Sequence[Index],
    source: Value,
    condition: Term | None = None,
    *,
    include_self: bool = True,
    mean: bool = False,
) -> Value:
    """Fold the sources into the elements of `x` at their indices, or replace these.

    Args:
        op: sum, prod, max or min.
        include_self: whether the old value of an element is included.
        mean: divide the sum by the number of values in it.
    """
    compute = _accumulator(x.dtype)
    place, inside = _inside(x.shape, place, source.shape, condition)

    def scattered(op: ScatterName, start: Value, each: Expr) -> Value:
        return ctx.scatter(op, start, source.shape, place, each, None if inside is None else inside.expr)

    old = convert(x, compute)
    extremum = op in ("max", "min")  # starts without the old value, which may be NaN
    begins_old = include_self and not extremum
    total = scattered(op, old if begins_old else _full(old, identity(op, compute)), convert(source, compute).expr)
    if include_self and extremum:
        total = combine(JOINS[op], old, total)
    if mean or not include_self:
        count = scattered("sum", Value(x.shape, torch.int32, x.device, const(0, torch.int32)), const(1, torch.int32))
        if mean:
            total = combine(lambda t, n: t / maximum(n + int(include_self), 1).to(compute), total, count)
        total = combine(lambda n, t, old_element: where(n > 0, t, old_element), count, total, old)
    return rounded(total, x.dtype)


def _full(like: Value, number: float) -> Value:
    return Value(like.shape, like.dtype, like.device, literal(number, like.dtype))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which elements of `dtype` are accumulated in memory: at least 32 bits wide."""
    if dtype.itemsize >= 4:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int32


def _inside(
    shape: Shape, place: Sequence[Index], sources: Shape, condition: Term | None
) -> tuple[list[Index], Term | None]:
    """Return the indices of sources, and the condition under which they are in range (and `condition` holds) or None.

    A checked index is in range where its check does not change it.
    """
    mask, indices = condition, list(place)
    for k, (index, size) in enumerate(zip(place, shape, strict=True)):
        if not isinstance(index, Expr):
            if is_within(index, size, sources):
                continue
            at = Term(IndexValue(index))
            test = (at >= 0) & (at < size)
        elif isinstance(index, Op) and index.name == CHECKED:
            indices[k] = wrapped(index)
            test = eq(Term(index), Term(wrapped(index)))
        else:
            at = Term(index)
            test = (at >= 0) & (at < size)
        mask = both(mask, test)
    return indices, mask


__all__ = ["JOINS", "folded", "updates_input", "written"]
