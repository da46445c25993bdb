"""The joint graph: what is decided about forward and backward together, before they are parted.

What enters is the functional ATen graph of both, as AOTAutograd traces it.  It is changed in place and computes the
same, up to rounding: gradients of maxima that cancel are not computed (`maxima.py`), sums that the graph already holds
in another order are taken from there (`reassociate.py`), gradients of what is too large to keep are computed in forward
(`ahead.py`), and what backward makes again, rather than forward saving it, is marked.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils.checkpoint import CheckpointPolicy

from fusion.joint.ahead import compute_ahead
from fusion.joint.factors import PRODUCTS
from fusion.joint.maxima import drop_vanishing_gradients
from fusion.joint.reassociate import reassociate
from fusion.options import WORKSPACE

EXACT = frozenset(
    overload for packet in (torch.ops.aten.eq, torch.ops.aten.ne) for overload in (packet.Tensor, packet.Scalar)
)
"""Operations whose result depends on the last bit of an operand."""

MAX_RECOMPUTED = 256
"""The longest axis that a product may run over to be made again rather than saved."""


def prepare(joint: fx.GraphModule, *, streams: bool, workspace: int = WORKSPACE) -> list[fx.Node]:
    """Ready a joint graph for its partition.

    Args:
        streams: can contractions be part of generated kernels, and so be made again where they are needed?
        workspace: bytes above which a product is not to be kept.

    Returns:
        What forward has to compute and keep, though only backward needs it.
    """
    drop_vanishing_gradients(joint)
    kept = compute_ahead(joint, workspace)
    reassociate(joint)
    if streams:
        prefer_recomputation(joint)
    return kept


def prefer_recomputation(joint: fx.GraphModule) -> None:
    """Mark what backward had better make again: products that are larger than their operands, maps of them, and what
    is made of constants alone (masks).

    Not what is compared for equality, as the gradient of a maximum does: made again by another kernel, it may differ in
    its last bit from the maximum that was saved, and nothing would be equal to it.
    """
    constant: set[fx.Node] = set()
    tiles: set[fx.Node] = set()
    preferred: list[fx.Node] = []
    products: dict[fx.Node, frozenset[fx.Node]] = {}  # tile → the products it is made of
    exact: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op != "call_function" or _is_random(node):
            continue
        made_of = frozenset[fx.Node]().union(*(products.get(arg, frozenset()) for arg in node.all_input_nodes))
        if node.target in EXACT:
            exact |= made_of
        if all(arg in constant for arg in node.all_input_nodes):
            constant.add(node)
        elif _grows(node) or (node.target not in PRODUCTS and _is_map_of(node, tiles)):
            tiles.add(node)
            products[node] = made_of or frozenset({node})
        else:
            continue
        if not any(user.op == "output" for user in node.users):
            preferred.append(node)
    for node in preferred:
        if not products.get(node, frozenset()) & exact:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_map_of(node: fx.Node, tiles: Collection[fx.Node]) -> bool:
    """Is this an operation on a tile that gives one as large?"""
    made = node.meta.get("val")
    taken = [arg.meta["val"] for arg in node.all_input_nodes if arg in tiles]
    return isinstance(made, torch.Tensor) and any(guard_or_false(made.numel() >= val.numel()) for val in taken)


def _grows(node: fx.Node) -> bool:
    """Is this a product over a short axis, larger than its operands together?

    It is not worth saving between forward and backward, which has the operands in any case: a kernel that needs a tile
    of it makes it again.  (Products that are to be streamed are told by the same measure.)
    """
    if node.target not in PRODUCTS:
        return False
    left, right = (arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node))
    short, size = left.shape[-1], node.meta["val"].numel()
    if not isinstance(short, int) or short > MAX_RECOMPUTED:
        return False
    return bool(guard_or_false(size > left.numel() + right.numel()))
