"""Capture: what the compiler needs to know about a graph, and how graphs are obtained.

Dynamo turns Python into fx graphs and AOTAutograd turns those into functional ATen graphs, forward and backward apart,
with the values saved between them chosen by min-cut.  What enters `aot_backend` is a function that compiles one ATen
graph; what leaves is a Dynamo backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils.checkpoint import CheckpointPolicy

from lowering.builder import size_of
from lowering.decompositions import decompositions
from lowering.errors import Unsupported

MAX_RECOMPUTED = 256
"""The longest axis that a product may run over to be made again rather than saved."""

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
        if streams(main_device(joint)):
            prefer_recomputation(joint)
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


def prefer_recomputation(joint: fx.GraphModule) -> None:
    """Mark what backward had better make again: products that are much larger than their operands, maps of them, and
    what is made of constants alone (masks).
    """
    constant: set[fx.Node] = set()
    tiles: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op != "call_function" or _is_random(node):
            continue
        if all(arg in constant for arg in node.all_input_nodes):
            constant.add(node)
        elif _grows(node) or (not _is_product(node) and _is_map_of(node, tiles)):
            tiles.add(node)
        else:
            continue
        if not any(user.op == "output" for user in node.users):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_product(node: fx.Node) -> bool:
    return node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


def _is_map_of(node: fx.Node, tiles: Collection[fx.Node]) -> bool:
    """Is this an operation on a tile that gives one as large?"""
    made = node.meta.get("val")
    taken = [arg.meta["val"] for arg in node.all_input_nodes if arg in tiles]
    return isinstance(made, torch.Tensor) and any(guard_or_false(made.numel() >= val.numel()) for val in taken)


def _grows(node: fx.Node) -> bool:
    """Is this a product over a short axis, much larger than its operands?

    It is not worth saving between forward and backward: a kernel that needs a tile of it makes it again.
    """
    if not _is_product(node):
        return False
    left, right = (arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node))
    short, size = left.shape[-1], node.meta["val"].numel()
    if not isinstance(short, int) or short > MAX_RECOMPUTED:
        return False
    return bool(guard_or_false(size >= 4 * (left.numel() + right.numel())))


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
