"""Marks views of inputs for recomputation in backward, so that the input itself is saved once.

A partition takes a view for as large as the input, and nearer to backward, and saves it.  Forward then makes each view
for backward alone, by the operations of the program, and autograd one more of each; an input costs neither, and kernels
of backward read through views.  (Attention of three inputs: eight calls, an eighth of the host's time for both.)
"""

from __future__ import annotations

from torch import fx

from fusion.joint.factors import is_tensor, value_of
from fusion.lowering.sizes import elements

TANGENTS = "tangents"
"""How AOTAutograd's names of the gradients that backward is given begin."""


def is_tangent(node: fx.Node) -> bool:
    """Is this an input of a joint graph, or of a backward, that is the gradient of a result?"""
    return node.op == "placeholder" and node.name.startswith(TANGENTS)


def views_of_inputs(joint: fx.GraphModule) -> list[fx.Node]:
    """The views that have as many elements as the input that they are views of, and need nothing else to be made.

    A part of an input would be saved as that: the partition counts what is saved, and would count all of the input.
    """
    inputs = {node for node in joint.graph.find_nodes(op="placeholder") if not is_tangent(node)}
    found: dict[fx.Node, None] = {}
    for node in joint.graph.nodes:
        if not getattr(node.target, "is_view", False) or len(node.all_input_nodes) != 1:
            continue
        (base,) = node.all_input_nodes
        if (base in inputs or base in found) and _is_as_large(node, base):
            found[node] = None
    return list(found)


def _is_as_large(view: fx.Node, base: fx.Node) -> bool:
    """Has a view, if it is one tensor, the elements of its base?"""
    return is_tensor(view) and is_tensor(base) and elements(value_of(view).shape) == elements(value_of(base).shape)
