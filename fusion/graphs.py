"""Graphs: what the compiler asks of an ATen graph: devices, sizes, and who gets what it takes and gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import sympy
import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors

from fusion.joint.saved import SPARE
from fusion.lowering.errors import Unsupported
from fusion.lowering.sizes import size_of

KEPT = tuple(
    getattr(descriptors, name)
    for name in ("SavedForBackwardsAOTOutput", "SavedForBackwardsNoVcCheckAOTOutput")
    if hasattr(descriptors, name)
)
"""What AOTAutograd calls results that backward alone gets, in this release."""


def main_device(graph: fx.GraphModule) -> torch.device:
    """The device a graph computes on: that of most of its results, an accelerator before the CPU.

    Raises:
        Unsupported: the graph holds no tensor.
    """
    seen = Counter(tensor.device for tensor in _tensors(graph))
    if not seen:
        raise Unsupported("the graph holds no tensors")
    return max(seen, key=lambda device: (device.type != "cpu", seen[device]))


def holds_tensors(graph: fx.GraphModule) -> bool:
    """Is there any tensor in a graph?  What is left of a region between two breaks may be sizes alone."""
    return next(_tensors(graph), None) is not None


def _tensors(graph: fx.GraphModule) -> Iterator[torch.Tensor]:
    for node in graph.graph.nodes:
        val = node.meta.get("val")
        for part in val if isinstance(val, (tuple, list)) else (val,):
            if isinstance(part, torch.Tensor):
                yield part


def size_hints(graph: fx.GraphModule) -> dict[sympy.Symbol, int]:
    """The sizes that symbolic dimensions had when the graph was traced."""
    hints: dict[sympy.Symbol, int] = {}
    for node in graph.graph.nodes:
        val = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(val, torch.SymInt):
            continue
        symbol = size_of(val)
        hint = val.node.hint
        if symbol.is_Symbol and isinstance(hint, int):
            hints[symbol] = hint
    return hints


def kept_for_backward(graph: fx.GraphModule) -> frozenset[int]:
    """The positions of those results of a forward graph that backward alone gets."""
    described = graph.graph.output_node().meta.get("desc", ())
    return frozenset(k for k, desc in enumerate(described) if isinstance(desc, KEPT))


def spare_inputs(graph: fx.GraphModule) -> frozenset[int]:
    """The positions of those inputs that only this graph is to see, and may write over."""
    return frozenset(k for k, node in enumerate(graph.graph.find_nodes(op="placeholder")) if SPARE in node.meta)
