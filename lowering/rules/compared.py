"""Compared: each element of a tensor looks for the sources that name it, so that nothing is written twice.

Input: the tensor, the positions along one dimension and the sources; what leaves says, for each element and each source
that it is compared with, whether that names it.  Where that would take more comparisons than a call may cost, each
source finds its place instead (`meeting`).
"""

from __future__ import annotations

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.expr import IndexValue
from fusion.lowering.indexing import ONE, ZERO, axis_symbol
from fusion.lowering.rules.assembly import placed
from fusion.lowering.rules.formula import Term, both, eq, literal
from fusion.lowering.scalar_ops import FoldName, identity
from fusion.lowering.value import Value, axes_of, reshape

MOST = 1 << 20
"""Comparisons of a place with a source that a call may cost."""
FEW = 32
"""Sources that each element of a tensor of any size may be compared with."""


def is_few(work: sympy.Expr) -> bool:
    """Is this a known number of comparisons that a call may cost?"""
    return bool(work.is_Integer and work <= MOST)


def is_compared(x: Value, dim: int, index: Value) -> bool:
    """Does each element of x look for its sources?

    Raises:
        Unsupported: the index has another rank.
    """
    if is_one(x, dim, index):
        return True
    if index.rank != x.rank:
        raise Unsupported("a scatter by a number")
    count = index.shape[dim]
    return bool(count.is_Integer and count <= FEW) or is_few(sympy.Mul(*x.shape) * count)


def is_one(x: Value, dim: int, index: Value) -> bool:
    """Is at most one place per row written?"""
    if x.rank == 0 or 0 in index.shape:
        return True
    dim %= x.rank
    return index.shape == (*x.shape[:dim], ONE, *x.shape[dim + 1 :])


def sources_of_each(x: Value, dim: int, index: Value, src: Value | None) -> tuple[Value, Value]:
    """(whether a source names an element of x, the source), each over the axes of x and, behind them, of the sources.

    One source per row has no axis.  The second is the first again where no sources are given.
    """
    if 0 in index.shape:
        never = Value(x.shape, torch.bool, x.device, literal(False, torch.bool))
        return never, never if src is None else Value(x.shape, src.dtype, x.device, literal(0, src.dtype))
    if x.rank == 0:
        always = Value((), torch.bool, x.device, eq(Term(reshape(index, ()).expr), 0).expr)
        return always, always if src is None else reshape(src, ())
    dim %= x.rank
    one = is_one(x, dim, index)
    count = index.shape[dim]
    shape = x.shape if one else (*x.shape, count)
    place: list[sympy.Expr] = list(axes_of(x.shape))
    place[dim] = ZERO if one else axis_symbol(x.rank)
    inside: Term | None = None
    for k, (size, own) in enumerate(zip(index.shape, x.shape, strict=True)):
        if k != dim and size != own:  # rows behind the last one of `index` are left out
            test = Term(IndexValue(axis_symbol(k))) < size
            inside = both(inside, test)
    at = placed(index, shape, place, inside)
    hit = eq(at, Term(IndexValue(axis_symbol(dim))))
    hit = hit if inside is None else hit & inside
    named = Value(shape, torch.bool, x.device, hit.expr)
    if src is None:
        return named, named
    return named, Value(shape, src.dtype, x.device, placed(src, shape, place, hit if inside is not None else None).expr)


def folded_sources(ctx: Builder, op: FoldName, value: Value, x: Value) -> Value:
    """The fold `op` of `value`, which has the sources of each element of x along one more, last dimension."""
    if value.shape[-1] == 0:
        return Value(x.shape, value.dtype, x.device, literal(identity(op, value.dtype), value.dtype))
    return ctx.reduce(op, [value], [x.rank])
