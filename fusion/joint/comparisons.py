"""Moves comparisons for equality that backward needs to forward.

The gradient of a maximum goes to the elements of the row that equal it.  Recomputed by another kernel, the row may be
rounded differently than where its maximum was computed, by the last bit of a float32 or because another value is stored
in 16 bits: then no element equals the maximum, and the gradient is a quotient by 0.  The flags of a row take a byte
each, less than the row that eager saves.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusion.joint.factors import root, value_of
from fusion.joint.facts import compared
from fusion.joint.loss_gradients import depending_on_tangents


def keep_comparisons(joint: fx.GraphModule) -> list[fx.Node]:
    """Return comparisons of computed floats that forward has to evaluate and save for backward.

    Inputs of the graph are the same in backward, and so is a maximum of them.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> def f(x, tangents):
    ...     y = x.sin()
    ...     return y.amax(), tangents * (y == y.amax())
    >>> show_graph(keep_comparisons, f, empty(3), empty(3))
      sin = sin(x)
      amax = amax(sin)
      amax_1 = amax(sin)
    - eq = eq.Tensor(sin, amax_1)
    + eq = eq.Tensor(sin, amax_1)   # save
      mul = mul.Tensor(tangents, eq)
      return amax, mul
    """
    comparisons = [node for node in joint.graph.nodes if (pair := compared(node)) and all(map(_is_computed, pair))]
    dependent = depending_on_tangents(joint.graph) if comparisons else set()
    kept = [node for node in comparisons if node not in dependent and any(user in dependent for user in node.users)]
    for node in kept:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return kept


def _is_computed(operand: fx.Node) -> bool:
    """Return whether this is a tensor of floats that the graph computes, and not a view of an input."""
    return value_of(operand).is_floating_point() and root(operand).op != "placeholder"
