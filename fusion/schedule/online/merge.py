"""Merging: accumulators of parts of an axis become those of the whole axis.

Input: accumulators as `online` gives them, each with what it is in a part and in the whole; output: what a part adds to
the whole.  An accumulator that follows a running value is brought up to date in a walk by its `carry`, from the value
before a block to the current one.  A part is a walk that ends there: its accumulators, with its own running values as
those before, and the merged ones as the current ones, are what they would be had they been summed up with the merged
values from the start.  So the sum of exponentials of a part, about its own maximum, counts as `sum_part * exp(max_part
- max)`; a part that has seen nothing is at its identity, which the carry knows how to leave.

Source: flash-decoding (Dao et al. 2023) for attention; here for every fold with an online form.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusion.lowering.expr import Expr, TileRef, rewrite
from fusion.lowering.kernel import Fold
from fusion.lowering.scalar_ops import FoldName

MERGEABLE = frozenset({"sum", "prod", "max", "min", "any", "all", "dot"})
"""Folds of which those of parts are folded again; one that keeps a position is not."""


def merged_op(fold: Fold) -> FoldName:
    """The operation that folds what parts of `fold` add: products of parts are summed."""
    return "sum" if fold.op == "dot" else fold.op


def brought(fold: Fold, part: Mapping[str, Expr], whole: Mapping[str, Expr]) -> Expr:
    """What a part of `fold` adds to the whole.

    Args:
        part: name of an accumulator → its value in the part; of `fold` and of those that it follows.
        whole: name → the merged value, of those that it follows.

    >>> import torch
    >>> from fusion.schedule.online import online
    >>> from fusion.lowering.expr import make_op
    >>> from fusion.lowering.expr import Load
    >>> from fusion.lowering.indexing import over_symbol
    >>> from fusion.lowering.printer import format_expr
    >>> r, f32 = over_symbol(0), torch.float32
    >>> top = Fold("top", "max", (Load("x", (r,), f32),), (r,), f32)
    >>> total = Fold("total", "sum", (make_op("exp", make_op("sub", *top.args, top.ref)),), (r,), f32)
    >>> (total,) = online(total, {"top": top}).folds
    >>> parts = {name: Load(name, (r,), f32) for name in ("top", "total")}
    >>> print(format_expr(brought(total, parts, {"top": top.ref})))
    total[r0] * where(top[r0] == top, 1.0, exp(top[r0] - top))
    """
    if fold.carry is None:
        return part[fold.name]

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, TileRef):
            return None
        return part[node.name] if node.before else whole[node.name]

    return rewrite([fold.carry], rule)[0]


__all__ = ["MERGEABLE", "brought", "merged_op"]
