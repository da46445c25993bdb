"""Capture: what the compiler needs to know about a graph, and how graphs are obtained.

Dynamo turns Python into fx graphs and AOTAutograd turns those into functional ATen graphs, forward and backward apart,
with the values saved between them chosen by min-cut.  What enters `aot_backend` is a function that compiles one ATen
graph; what leaves is a Dynamo backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusion.joint import prepare
from lowering.builder import size_of
from lowering.decompositions import decompositions
from lowering.errors import Unsupported

Boxed: TypeAlias = Callable[[list[object]], tuple[object, ...]]
CompileOne: TypeAlias = Callable[[fx.GraphModule, str], Boxed]
"""Compiles one ATen graph; the label says which ("forward", "backward", "inference")."""


def aot_backend(
    compile_one: CompileOne, streams: Callable[[torch.device], bool]
) -> Callable[[fx.GraphModule, Sequence[object]], Callable[..., object]]:
    """A Dynamo backend that gives every functional ATen graph to `compile_one`.

    Args:
        streams: can contractions be part of generated kernels on a device?
    """

    def partition(
        joint: fx.GraphModule, inputs: Sequence[object], *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        prepare(joint, streams=streams(main_device(joint)))
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)

    def labelled(label: str) -> Callable[[fx.GraphModule, Sequence[object]], Boxed]:
        def compiler(graph: fx.GraphModule, example_inputs: Sequence[object]) -> Boxed:
            with unset_fake_temporarily():  # what the compiler computes while it compiles is real
                compiled = compile_one(graph, label)
            compiled._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark of the list convention
            return compiled

        return compiler

    backend: Callable[[fx.GraphModule, Sequence[object]], Callable[..., object]] = aot_autograd(
        fw_compiler=labelled("forward"),
        bw_compiler=labelled("backward"),
        inference_compiler=labelled("inference"),
        decompositions=decompositions(),
        partition_fn=partition,
    )
    return backend


def main_device(graph: fx.GraphModule) -> torch.device:
    """The device a graph computes on: that of most of its results, an accelerator before the CPU.

    Raises:
        Unsupported: the graph holds no tensor.
    """
    seen: Counter[torch.device] = Counter()
    for node in graph.graph.nodes:
        val = node.meta.get("val")
        for part in val if isinstance(val, (tuple, list)) else (val,):
            if isinstance(part, torch.Tensor):
                seen[part.device] += 1
    if not seen:
        raise Unsupported("the graph holds no tensors")
    return max(seen, key=lambda device: (device.type != "cpu", seen[device]))


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
