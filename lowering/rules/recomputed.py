"""Finds values that forward and backward both compute, whose rounding must not depend on which of them stores it.

The maximum and the sum of a row that forward saves have to fit the row that backward recomputes.  Inside a kernel a
16-bit float is not rounded, in memory it is: if one pass stored a value that the other does not, probabilities would no
longer add up to 1.  So recomputed values are stored in float32, and never rounded: results of maps, and of products,
which the library's call computes in float32, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from fusion.lowering.ir.expr import Cast, Expr
from fusion.lowering.ir.scalar_ops import HALVES
from fusion.lowering.registry import RULES

CALLED = frozenset({torch.ops.aten.mm.default, torch.ops.aten.bmm.default})
"""Operations that may stay library calls in spite of their rules; these read 16-bit floats."""


def is_recomputed(node: fx.Node) -> bool:
    """Return whether a node's result is computed by both forward and backward rather than saved."""
    return node.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE


def unrounded(node: fx.Node, value: Expr) -> Expr | None:
    """Return the float32 to store in place of `node`'s result, if both passes compute it and no call reads it."""
    if not (isinstance(value, Cast) and value.implicit and value.dtype in HALVES and value.arg.dtype is torch.float32):
        return None
    inside = all(user.target in RULES and user.target not in CALLED for user in _readers(node))
    return value.arg if inside and is_recomputed(node) else None


def is_wide(node: fx.Node) -> bool:
    """Return whether a 16-bit product is computed in float32: both passes compute it, and not only calls read it."""
    inside = (user.target in RULES and user.target not in CALLED for user in _readers(node))
    return is_recomputed(node) and any(inside)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a node, directly or through views."""
    for user in node.users:
        registered = RULES.get(user.target) if isinstance(user.target, OpOverload) else None
        if registered is not None and registered.lazy:
            yield from _readers(user)
        else:
            yield user
