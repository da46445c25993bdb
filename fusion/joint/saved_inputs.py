"""Marks views of inputs for recomputation in backward, so that the input itself is saved once.

A partition regards a view as as large as the input, and nearer to backward, and saves it.  Forward would then make each
view for backward alone, by the operations of the program, and autograd one more of each; an input costs neither, and
kernels of backward read through views.  (Attention with three inputs: eight calls, an eighth of the host's time for
both.)
"""

from __future__ import annotations

from torch import fx

from fusion.joint.factors import is_tensor, value_of
from fusion.lowering.sizes import elements

TANGENTS = "tangents"
"""The prefix of AOTAutograd's names for the incoming gradients of backward."""


def is_tangent(node: fx.Node) -> bool:
    """Return whether this is an incoming gradient of a joint graph, or of a backward."""
    return node.op == "placeholder" and node.name.startswith(TANGENTS)


def views_of_inputs(joint: fx.GraphModule) -> list[fx.Node]:
    """Return the views with as many elements as their input, and no other operands.

    A part of an input should be saved: the partition counts saved elements, and would count the full input.
    """
    inputs = {node for node in joint.graph.find_nodes(op="placeholder") if not is_tangent(node)}
    views: dict[fx.Node, None] = {}
    for node in joint.graph.nodes:
        if not getattr(node.target, "is_view", False) or len(node.all_input_nodes) != 1:
            continue
        (base,) = node.all_input_nodes
        if (base in inputs or base in views) and _is_as_large(node, base):
            views[node] = None
    return list(views)


def _is_as_large(view: fx.Node, base: fx.Node) -> bool:
    """Return whether a view has as many elements as its base."""
    return is_tensor(view) and is_tensor(base) and elements(value_of(view).shape) == elements(value_of(base).shape)
