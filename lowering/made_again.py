"""What forward and backward both make: halves whose roundings must not depend on which of the two stores them.

The maximum and the sum of a row that forward keeps have to fit the row that backward makes again.  Inside a kernel a
half is not rounded, in memory it is: where one pass stores what the other does not, probabilities would no longer add
up to 1.  So what both make is stored in float32, and rounded by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from fusion.lowering.expr import Cast, Expr
from fusion.lowering.registry import RULES
from fusion.lowering.scalar_ops import HALVES

CALLED = frozenset({torch.ops.aten.mm.default, torch.ops.aten.bmm.default})
"""Operations that may be calls in spite of their rules: these read halves."""


def is_made_again(node: fx.Node) -> bool:
    """Is a node's result computed by both forward and backward rather than kept?"""
    return node.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE


def unrounded(node: fx.Node, value: Expr) -> Expr | None:
    """What is stored in place of the result of `node`: its float32, if both passes make it and no call reads it."""
    if not (isinstance(value, Cast) and value.implicit and value.dtype in HALVES and value.arg.dtype is torch.float32):
        return None
    inside = all(user.target in RULES and user.target not in CALLED for user in _readers(node))
    return value.arg if inside and is_made_again(node) else None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a node, directly or through views."""
    for user in node.users:
        registered = RULES.get(user.target) if isinstance(user.target, OpOverload) else None
        if registered is not None and registered.lazy:
            yield from _readers(user)
        else:
            yield user
