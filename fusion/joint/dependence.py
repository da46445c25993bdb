"""Determines on which results' gradients the gradient of each input depends.

In eager an input has no gradient if no path leads from it to the differentiated result.  The backward of a region takes
gradients of all its results, zeros for missing ones, and so returns zeros for inputs that lead to these alone.

Input: the joint graph; output: for each input that is a tensor, the results whose gradients its own depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import fx

Numbers: TypeAlias = frozenset[int]

TANGENTS = "tangents"
"""The prefix of AOTAutograd's names for the incoming gradients of backward."""


def is_tangent(node: fx.Node) -> bool:
    """Return whether this is an incoming gradient of a joint graph, or of a backward."""
    return node.op == "placeholder" and node.name.startswith(TANGENTS)


@dataclass(frozen=True, slots=True)
class Dependence:
    """For each input that is a tensor, the numbers of the `tangents` that its gradient depends on."""

    tangents: int
    of: tuple[Numbers, ...]

    @property
    def partial(self) -> bool:
        """Whether a gradient depends on some of the tangents and not on others."""
        return any(0 < len(numbers) < self.tangents for numbers in self.of)


def dependence_of(joint: fx.GraphModule, results: int) -> Dependence | None:
    """Return the dependence of a joint graph's gradients; None if it does not have one gradient for each input.

    Args:
        results: the number of forward results; gradients follow them.
    """
    holders = joint.graph.find_nodes(op="placeholder")
    tangents = [node for node in holders if is_tangent(node)]
    inputs = [node for node in holders if not is_tangent(node)]
    gradients = list(cast("Sequence[fx.Node | None]", joint.graph.output_node().args[0]))[results:]
    if len(gradients) != len(inputs):
        return None
    reached: dict[fx.Node, Numbers] = {node: frozenset({k}) for k, node in enumerate(tangents)}
    nothing = Numbers()
    for node in joint.graph.nodes:
        known = {reached[arg] for arg in node.all_input_nodes if arg in reached}
        if known:
            reached[node] = known.pop() if len(known) == 1 else nothing.union(*known)
    pairs = zip(inputs, gradients, strict=True)
    of = (
        nothing if gradient is None else reached.get(gradient, nothing)
        for given, gradient in pairs
        if isinstance(given.meta.get("val"), torch.Tensor)
    )
    return Dependence(len(tangents), tuple(of))
