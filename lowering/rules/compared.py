"""Lowers scatters to comparisons: each element searches the sources that target it, so that no writes collide.

Input: the tensor, the target positions along one dimension and the sources; output: for each pair of an element and a
source that is compared with it, whether the source targets the element.  If that takes too many comparisons, each
source is scattered instead (`collisions`).
"""

from __future__ import annotations

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ONE, ZERO, axis_symbol
from fusion.lowering.ir.expr import IndexValue
from fusion.lowering.ir.scalar_ops import FoldName, identity
from fusion.lowering.rules.assembly import placed
from fusion.lowering.rules.formula import Term, both, eq, literal
from fusion.lowering.value import Value, axes_of, reshape

MOST_COMPARISONS = 1 << 20
"""The most comparisons of elements with sources that one call may make."""
FEW_SOURCES = 32
"""The number of sources per row up to which each element is compared with all of them, for tensors of any size."""


def is_few(work: sympy.Expr) -> bool:
    """Return whether the number of comparisons is known and at most `MOST_COMPARISONS`."""
    return bool(work.is_Integer and work <= MOST_COMPARISONS)


def is_compared(x: Value, dim: int, index: Value) -> bool:
    """Return whether the scatter is lowered as a gather: each output element compares its position with all sources.

    Raises:
        Unsupported: the index has another rank.
    """
    if is_one(x, dim, index):
        return True
    if index.rank != x.rank:
        raise Unsupported("a scatter by a number")
    count = index.shape[dim]
    return bool(count.is_Integer and count <= FEW_SOURCES) or is_few(sympy.Mul(*x.shape) * count)


def is_one(x: Value, dim: int, index: Value) -> bool:
    """Return whether the scatter writes at most one element per row."""
    if x.rank == 0 or 0 in index.shape:
        return True
    dim %= x.rank
    return index.shape == (*x.shape[:dim], ONE, *x.shape[dim + 1 :])


def sources_of_each(x: Value, dim: int, index: Value, src: Value | None) -> tuple[Value, Value]:
    """Return a flag, whether a source is written to an element of x, and the source; both over the axes of x and of the
    sources.

    A single source per row has no axis.  Without `src`, the flag is returned twice.
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
    source_index: list[sympy.Expr] = list(axes_of(x.shape))
    source_index[dim] = ZERO if one else axis_symbol(x.rank)
    inside: Term | None = None
    for k, (size, size_of_x) in enumerate(zip(index.shape, x.shape, strict=True)):
        if k != dim and size != size_of_x:  # rows behind the last one of `index` are left out
            test = Term(IndexValue(axis_symbol(k))) < size
            inside = both(inside, test)
    at = placed(index, shape, source_index, inside)
    hit = eq(at, Term(IndexValue(axis_symbol(dim))))
    hit = hit if inside is None else hit & inside
    named = Value(shape, torch.bool, x.device, hit.expr)
    if src is None:
        return named, named
    return named, Value(
        shape, src.dtype, x.device, placed(src, shape, source_index, hit if inside is not None else None).expr
    )


def folded_sources(ctx: Builder, op: FoldName, value: Value, x: Value) -> Value:
    """Fold `value` over its last dimension, which runs over the sources of each element of x."""
    if value.shape[-1] == 0:
        return Value(x.shape, value.dtype, x.device, literal(identity(op, value.dtype), value.dtype))
    return ctx.reduce(op, [value], [x.rank])
