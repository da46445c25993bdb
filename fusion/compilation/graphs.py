"""Reads facts from ATen graphs: devices, sizes, results that only backward gets, inputs that may be overwritten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import sympy
import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors

from fusion.joint.saved import DONATED
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.sizes import size_of

KEPT = tuple(
    getattr(descriptors, name)
    for name in ("SavedForBackwardsAOTOutput", "SavedForBackwardsNoVcCheckAOTOutput")
    if hasattr(descriptors, name)
)
"""AOTAutograd's descriptors of results that only backward gets, in this release."""


def main_device(graph: fx.GraphModule) -> torch.device:
    """Return the device on which a graph computes: the device of most of its tensors, an accelerator before the CPU.

    Raises:
        Unsupported: the graph holds no tensor.
    """
    seen = Counter(tensor.device for tensor in _tensors(graph))
    if not seen:
        raise Unsupported("the graph holds no tensors")
    return max(seen, key=lambda device: (device.type != "cpu", seen[device]))


def holds_tensors(graph: fx.GraphModule) -> bool:
    """Return whether a graph has tensors; a region between two graph breaks may have only sizes."""
    return next(_tensors(graph), None) is not None


def _tensors(graph: fx.GraphModule) -> Iterator[torch.Tensor]:
    for node in graph.graph.nodes:
        val = node.meta.get("val")
        for part in val if isinstance(val, (tuple, list)) else (val,):
            if isinstance(part, torch.Tensor):
                yield part


def size_hints(graph: fx.GraphModule) -> dict[sympy.Symbol, int]:
    """Return the traced values of symbolic sizes."""
    hints: dict[sympy.Symbol, int] = {}
    for node in graph.graph.nodes:
        val = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(val, torch.SymInt):
            continue
        symbol = size_of(val)
        hint = val.node.hint
        if isinstance(symbol, sympy.Symbol) and isinstance(hint, int):
            hints[symbol] = hint
    return hints


def kept_for_backward(graph: fx.GraphModule) -> frozenset[int]:
    """Return the positions of the results of a forward graph that only backward gets."""
    described = graph.graph.output_node().meta.get("desc", ())
    return frozenset(k for k, desc in enumerate(described) if isinstance(desc, KEPT))


def donated_inputs(graph: fx.GraphModule) -> frozenset[int]:
    """Return the positions of inputs that only this graph reads, and may overwrite."""
    return frozenset(k for k, node in enumerate(graph.graph.find_nodes(op="placeholder")) if DONATED in node.meta)
