"""Moves a captured program to another device, which need not be present.

Input: a program over fake tensors; output: the same over fake tensors on the other device.  Tensors that the program
creates are created there, and calls that PyTorch dispatches by device (another kernel for attention) are traced anew.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate

from fusion.artifact.capture import CapturedProgram, Leaf, described_values
from fusion.lowering.errors import Unsupported, brief


def moved(program: CapturedProgram, device: torch.device) -> CapturedProgram:
    """Return `program` with all of its tensors on `device`.  Its weights are left where they are.

    Raises:
        Unsupported: this build of PyTorch does not know an operation there.
    """
    mode = program.mode
    graph = fx.GraphModule(program.graph, program.graph.graph)
    for node in graph.graph.nodes:
        node.args = map_aggregate(node.args, lambda value: device if isinstance(value, torch.device) else value)
        node.kwargs = map_aggregate(node.kwargs, lambda value: device if isinstance(value, torch.device) else value)
    inputs = tuple(_moved(value, mode, device) for value in program.inputs)
    graph.recompile()
    try:
        results = described_values(graph, inputs, mode)
    except RuntimeError as error:
        raise Unsupported(
            f"PyTorch cannot trace the program for {device.type}: {brief(error)}",
            hint="use a build of PyTorch with support for it; the device need not be present",
        ) from error
    arguments = iter(inputs[len(program.weights) + len(program.sizes) :])
    leaves = tuple(Leaf(leaf.name, next(arguments)) if leaf.is_input else leaf for leaf in program.leaves)
    return replace(program, graph=graph, inputs=inputs, leaves=leaves, results=results)


def _moved(value: object, mode: FakeTensorMode, device: torch.device) -> object:
    if not isinstance(value, FakeTensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


__all__ = ["moved"]
