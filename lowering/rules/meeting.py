"""Scatters as nodes: any number of sources, each with its place in a tensor, of which several may name one element.

Input: a tensor, the places of the sources (an index for each of its dimensions, over the axes of the sources) and the
sources; output: the tensor with the sources written to it or folded into it.  Narrow types are summed up in 32 bits and
rounded once.  Nothing is written at a place out of range, of which a rule sees to it that it fails a check where eager
looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from fusion.lowering.builder import Builder
from fusion.lowering.checks import CHECKED, is_within, wrapped
from fusion.lowering.expr import Expr, Index, IndexValue, Op, const
from fusion.lowering.rules.formula import Term, both, eq, literal, maximum, minimum, where
from fusion.lowering.rules.promotion import combine, convert, rounded
from fusion.lowering.scalar_ops import JoinName, ScatterName, identity
from fusion.lowering.updates import COPY
from fusion.lowering.value import Shape, Value

aten = torch.ops.aten

JOINS: dict[JoinName, Callable[[Term, Term], Term]] = {
    "sum": Term.__add__,
    "prod": Term.__mul__,
    "max": maximum,
    "min": minimum,
}


def updates_input(ctx: Builder) -> bool:
    """Is the result of the current call copied back into the input that it is made of, as an updated cache is?

    Only where nothing else reads that input, so that the update can take place in it.
    """
    x = ctx.current.args[0]
    if not isinstance(x, fx.Node) or x.op != "placeholder":
        return False
    others = [user for user in x.users if user is not ctx.current and not _is_replaced(user)]
    return len(others) == 1 and others[0].target is COPY and others[0].args == (x, ctx.current)


def _is_replaced(view: fx.Node) -> bool:
    """Is this only there to be copied over, so that its shape is all that is read?"""
    if view.op != "call_function" or not view.users:
        return False
    return all((user.target is aten.copy.default and user.args[0] is view) or _is_replaced(user) for user in view.users)


def written(ctx: Builder, x: Value, place: Sequence[Index], source: Value, held: Term | None = None) -> Value:
    """`x` with each source at its place, where `held` holds; of those that meet, one stays."""
    place, inside = _inside(x.shape, place, source.shape, held)
    return ctx.scatter("store", x, source.shape, place, source.expr, None if inside is None else inside.expr)


def folded(
    ctx: Builder,
    op: JoinName,
    x: Value,
    place: Sequence[Index],
    source: Value,
    held: Term | None = None,
    *,
    include_self: bool = True,
    mean: bool = False,
) -> Value:
    """`x` with the sources folded into the elements they name, or put in their place.

    Args:
        op: sum, prod, max or min.
        include_self: is the old value of an element one of what is folded?
        mean: the sum is divided by how many it is of.
    """
    compute = _accumulator(x.dtype)
    place, inside = _inside(x.shape, place, source.shape, held)

    def met(op: ScatterName, start: Value, each: Expr) -> Value:
        return ctx.scatter(op, start, source.shape, place, each, None if inside is None else inside.expr)

    old = convert(x, compute)
    compared = op in ("max", "min")  # which begins without a NaN of the old value
    begins_old = include_self and not compared
    total = met(op, old if begins_old else _full(old, identity(op, compute)), convert(source, compute).expr)
    if include_self and compared:
        total = combine(JOINS[op], old, total)
    if mean or not include_self:
        count = met("sum", Value(x.shape, torch.int32, x.device, const(0, torch.int32)), const(1, torch.int32))
        if mean:
            total = combine(lambda t, n: t / maximum(n + int(include_self), 1).to(compute), total, count)
        total = combine(lambda n, t, was: where(n > 0, t, was), count, total, old)
    return rounded(total, x.dtype)


def _full(like: Value, number: float) -> Value:
    return Value(like.shape, like.dtype, like.device, literal(number, like.dtype))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which elements of `dtype` are joined in memory: at least 32 bits wide."""
    if dtype.itemsize >= 4:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int32


def _inside(shape: Shape, place: Sequence[Index], sources: Shape, held: Term | None) -> tuple[list[Index], Term | None]:
    """The places of sources in a tensor of this shape, and where they are in it and `held` holds; None for everywhere.

    What is checked is in it where its check leaves it as it is.
    """
    found, settled = held, list(place)
    for k, (index, size) in enumerate(zip(place, shape, strict=True)):
        if not isinstance(index, Expr):
            if is_within(index, size, sources):
                continue
            at = Term(IndexValue(index))
            test = (at >= 0) & (at < size)
        elif isinstance(index, Op) and index.name == CHECKED:
            settled[k] = wrapped(index)
            test = eq(Term(index), Term(wrapped(index)))
        else:
            at = Term(index)
            test = (at >= 0) & (at < size)
        found = both(found, test)
    return settled, found


__all__ = ["JOINS", "folded", "updates_input", "written"]
