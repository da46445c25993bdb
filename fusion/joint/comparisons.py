"""Comparisons for equality that backward needs are made in forward.

The gradient of a maximum goes to where the row is equal to it.  Made again by another kernel, the row may be rounded
otherwise than where its maximum was found, by the last bit of a float32 or because another value is stored as a half:
then nothing is equal to the maximum, and the gradient is a quotient by 0.  The flags of a row are a byte each, less
than the row that eager keeps.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusion.joint.factors import is_tensor, root, value_of
from fusion.joint.loss_gradients import waiting_for_tangents

EXACT = (torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor)
"""Operations whose result depends on the last bit of an operand."""


def keep_comparisons(joint: fx.GraphModule) -> list[fx.Node]:
    """What forward has to compare and keep: floats that it computes on both sides, without a gradient.

    What is given to it is there in backward as it was, and so is a maximum of that.
    """
    found = [node for node in joint.graph.nodes if node.target in EXACT and all(map(_is_computed, node.args))]
    waiting = waiting_for_tangents(joint.graph) if found else set()
    kept = [node for node in found if node not in waiting and any(user in waiting for user in node.users)]
    for node in kept:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return kept


def _is_computed(operand: object) -> bool:
    """Is this a tensor of floats, and not, but for views, one that the graph is given?"""
    if not is_tensor(operand):
        return False
    node = cast(fx.Node, operand)
    return value_of(node).is_floating_point() and root(node).op != "placeholder"
