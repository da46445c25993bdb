"""Merges accumulators of parts of an axis into those of the full axis.

Input: accumulators as returned by `online`, each with its value in a part and in total; output: the part's contribution
to the total.  In a loop, an accumulator that depends on a running value is corrected by its `carry`, from the value
before a block to the current one.  A part is a loop that ends early: with its own running values in place of those
before, and the merged ones in place of the current ones, `carry` corrects its accumulators as if they had been computed
with the merged values from the start.  So the sum of exponentials of a part, relative to its own maximum, contributes
`sum_part * exp(max_part - max)`; an empty part is at its identity, which the carry handles.

Source: flash-decoding (Dao et al. 2023) for attention; here for every fold with an online form.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusion.lowering.ir.expr import Expr, TileRef, rewrite
from fusion.lowering.ir.kernel import Fold
from fusion.lowering.ir.scalar_ops import FoldName

MERGEABLE = frozenset({"sum", "prod", "max", "min", "any", "all", "dot"})
"""Folds whose parts are folded again; a fold of positions is not among them."""


def merged_op(fold: Fold) -> FoldName:
    """Return the operation that folds the parts of `fold`: parts of products are summed."""
    return "sum" if fold.op == "dot" else fold.op


def contribution(fold: Fold, part: Mapping[str, Expr], whole: Mapping[str, Expr]) -> Expr:
    """Return the contribution of a part of `fold` to the total.

    Args:
        part: accumulator → its value in the part; for `fold` and the folds it depends on.
        whole: accumulator → the merged value, for the folds it depends on.

    >>> import torch
    >>> from fusion.schedule.online import online
    >>> from fusion.lowering.ir.expr import make_op
    >>> from fusion.lowering.ir.expr import Load
    >>> from fusion.lowering.indexing import over_symbol
    >>> from fusion.lowering.printer import format_expr
    >>> r, f32 = over_symbol(0), torch.float32
    >>> top = Fold("top", "max", (Load("x", (r,), f32),), (r,), f32)
    >>> total = Fold("total", "sum", (make_op("exp", make_op("sub", *top.args, top.ref)),), (r,), f32)
    >>> (total,) = online(total, {"top": top}).folds
    >>> parts = {name: Load(name, (r,), f32) for name in ("top", "total")}
    >>> print(format_expr(contribution(total, parts, {"top": top.ref})))
    total[r0] * where(top[r0] == top, 1.0, exp(top[r0] - top))
    """
    if fold.carry is None:
        return part[fold.name]

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, TileRef):
            return None
        return part[node.name] if node.before else whole[node.name]

    return rewrite([fold.carry], rule)[0]


__all__ = ["MERGEABLE", "contribution", "merged_op"]
