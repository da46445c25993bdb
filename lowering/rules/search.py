"""Lowers binary search in a sorted sequence, one per element, with its steps unrolled.

A sequence of n numbers takes ⌈log₂(n + 1)⌉ dependent loads.  NaN comes after every number.  A sequence of symbolic
length is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from fusion.lowering.builder import Builder
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import ZERO
from fusion.lowering.ir.expr import Expr, guarded
from fusion.lowering.ir.requirements import Requirement
from fusion.lowering.registry import lowers
from fusion.lowering.rules import reduction
from fusion.lowering.rules.formula import Term, literal, maximum, minimum, where
from fusion.lowering.rules.promotion import Argument, Kind, convert, promote, requiring, term_of
from fusion.lowering.value import Shape, Value, axes_of

aten = torch.ops.aten


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(ctx: Builder, x: Argument, boundaries: Value, *, out_int32: bool = False, right: bool = False) -> Value:
    """For each element the number of ascending boundaries below it; with `right`, also of equal ones."""
    return _insertion_points(boundaries, x, [], None, out_int32=out_int32, right=right)


@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    ctx: Builder,
    sequence: Value,
    x: Argument,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    """For each element the number of smaller ones in the sequence of its row; `sorter` holds the order in which it
    ascends.
    """
    rows = axes_of(sequence.shape)[:-1]
    if sorter is not None and 0 not in sorter.shape:
        sorter = _in_range(ctx, sorter)
    return _insertion_points(sequence, x, rows, sorter, out_int32=out_int32, right=right or side == "right")


def _in_range(ctx: Builder, sorter: Value) -> Value:
    """Return the places in a sorter, which have to be within the sequence, also places that no search reads."""
    places = convert(sorter, torch.int64)
    least, most = (reduction.fold(ctx, op, [places], [places.rank - 1], keepdim=True) for op in ("min", "max"))
    length = sorter.shape[-1]
    return requiring(Requirement.SORTER, lambda _, least, most: (least >= 0) & (most < length), places, least, most)


def _insertion_points(
    sequence: Value,
    x: Argument,
    rows: Sequence[sympy.Symbol],
    sorter: Value | None,
    *,
    out_int32: bool,
    right: bool,
) -> Value:
    length = sequence.shape[-1]
    if not length.is_Integer:
        raise Unsupported(f"search in a sequence of length {length}")
    compute, _ = promote((sequence, x), Kind.DEFAULT)
    shape = x.shape if isinstance(x, Value) else ()
    sought = term_of(x, shape, compute)
    position = Term(literal(0, torch.int64))
    for bit in reversed(range(int(length).bit_length())):
        further = position + (1 << bit)
        exists = further <= length
        element = _element(sequence, shape, rows, further - 1, exists, sorter).to(compute)
        after = element > sought if right else element >= sought
        position = where(exists & ~after, further, position)
    result = Value(shape, torch.int64, sequence.device, position.expr)
    return convert(result, torch.int32) if out_int32 else result


def _element(
    sequence: Value, shape: Shape, rows: Sequence[sympy.Symbol], place: Term, exists: Term, sorter: Value | None
) -> Term:
    """Return the element at `place` of the row's sequence, read only where it exists."""

    def read(source: Value, at: Term) -> Expr:
        bound = {s: ZERO if size == 1 else s for s, size in zip(rows, source.shape, strict=False)}
        return guarded(source.view(shape, [*(bound[s] for s in rows), at.expr]).expr, exists.expr, safe=[at.expr])

    if sorter is not None:
        place = minimum(maximum(Term(read(sorter, place)), 0), sequence.shape[-1] - 1)
    return Term(read(sequence, place))
